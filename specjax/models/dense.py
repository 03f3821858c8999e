"""Matrix products with stored ``[out, in]`` weights, in the form each platform likes.

XLA's CPU backend reads weights at a third of the memory bandwidth when a product of
2-16 rows is written ``x @ w.T``; written ``(w @ x.T).T`` behind optimisation barriers
(which keep the algebraic simplifier from undoing it) it reads them near full speed. A
small weight stays in the processor's cache, and is multiplied lane by lane.
Other platforms, and products of many rows, take the plain form. Every projection of a
model goes through here, so that this choice stands in one place. So does a weight that
is not stored as its numbers, or multiplies otherwise: a `Weight`, of which a model need
not know.
"""

from __future__ import annotations

import abc
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Above this many rows a product is bound by arithmetic, and the plain form is faster.
_MAX_STREAMED_ROWS = 32
# Weights of at most so many numbers are multiplied lane by lane: 8 to a register of 256
# bits, in 4 independent sums.
_MAX_UNROLLED = 262_144
_LANES, _CHAINS = 8, 4
_HALF, _WIDE = jnp.bfloat16, jnp.float32


def _contract(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    # Of one axis of rows: jax 0.7's CPU backend has no kernel for more where factors of
    # bfloat16 make a result of float32 and the processor has matrix units for them.
    rows = x.reshape(-1, x.shape[-1])
    dims = (((1,), (weight.ndim - 1,)), ((), ()))
    product = lax.dot_general(rows, weight, dims, preferred_element_type=dtype)
    return product.reshape(x.shape[:-1] + weight.shape[:-1])


def _stream_weights(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    rows = weight.reshape(-1, weight.shape[-1])
    product = jnp.matmul(rows, columns, preferred_element_type=dtype)
    return lax.optimization_barrier(product).T.reshape(x.shape[:-1] + weight.shape[:-1])


def _half(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A product of bfloat16 factors, of few rows.

    Of one row, or a bfloat16 result, XLA's CPU backend widens the factors first: all
    weights of a loop, before it starts, three times their memory. Of two rows and a
    float32 result it computes with them as they are, where the processor can.
    """
    rows = x.reshape(-1, x.shape[-1])
    # Of more axes, a transposed copy would be made and kept.
    matrix = weight if _on_mesh() else weight.reshape(-1, weight.shape[-1])
    wide = _contract(jnp.pad(rows, ((0, rows.shape[0] == 1), (0, 0))), matrix, _WIDE)
    # Else the row that is left out would be left out before.
    wide = lax.optimization_barrier(wide)[: rows.shape[0]]
    return wide.astype(dtype).reshape(x.shape[:-1] + weight.shape[:-1])


def _on_mesh() -> bool:
    """Whether weights may be split: then axes of theirs cannot be joined, of which one
    is, but by gathering the weight."""
    return not jax.sharding.get_abstract_mesh().empty


def _unroll(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A product of few rows and a small weight as sums over groups of lanes.

    XLA's matrix product packs the weight anew at each call, which for two to eight rows
    takes longer than the arithmetic. Written as elementwise sums it is one loop over
    the weight as it lies, with the lanes of a vector register innermost.
    """
    rows = x.reshape(1, -1, x.shape[-1] // _LANES, _LANES)
    columns = weight.reshape(-1, 1, *rows.shape[2:])
    # Several sums, so that one addition need not wait for the one before.
    sums: list[jax.Array] = []
    for group in range(rows.shape[2]):
        product = columns[:, :, group] * rows[:, :, group]
        if len(sums) < _CHAINS:
            sums.append(product)
        else:
            sums[group % _CHAINS] = sums[group % _CHAINS] + product
    by_lane = functools.reduce(jnp.add, sums).reshape(-1, _LANES)
    product = (by_lane @ jnp.ones(_LANES, x.dtype)).reshape(columns.shape[0], -1)
    return product.T.reshape(x.shape[:-1] + weight.shape[:-1]).astype(dtype)


def _small(x: jax.Array, weight: jax.Array) -> bool:
    count = math.prod(x.shape[:-1])
    floats = x.dtype == weight.dtype == jnp.float32
    divides = x.shape[-1] % _LANES == 0
    return floats and divides and 2 <= count <= 8 and weight.size <= _MAX_UNROLLED


class Weight(abc.ABC):
    """A weight that multiplies in its own way: the value of a parameter, a pytree."""

    def __getitem__(self, index: Any) -> Any:
        """Itself: parameters are read as ``weight[...]``."""
        return self

    @abc.abstractmethod
    def multiply(self, x: Float[Array, "*rows in_dim"], dtype: DTypeLike) -> Array:
        """What `dense` gives."""


@struct.dataclass
class Int8(Weight):
    """A weight as whole numbers of 8 bits, times a scale for each output.

    Attributes:
        values: -127 .. 127.
        scale: of the type that the rest of the model has.
    """

    values: Int[Array, "*out in_dim"]
    scale: Float[Array, "*out"]

    @classmethod
    def of(cls, weight: Float[Array, "*out in_dim"]) -> Int8:
        """The nearest one: symmetric, and exact at each output's largest number."""
        wide = weight.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=-1)
        scale = (jnp.where(largest > 0, largest, 1.0) / 127).astype(weight.dtype)
        # Rounded to what the product will use.
        steps = jnp.round(wide / scale.astype(jnp.float32)[..., None])
        return cls(jnp.clip(steps, -127, 127).astype(jnp.int8), scale)

    @property
    def dtype(self) -> jnp.dtype:
        """Of what it makes."""
        return self.scale.dtype

    def multiply(self, x: Float[Array, "*rows in_dim"], dtype: DTypeLike) -> Array:
        """The product with the whole numbers, then scaled."""
        # Made to depend on x (NaN moves them, which harms nothing more): a loop would
        # else convert all weights before it starts, and keep and read the wide ones. An
        # optimisation barrier did not hold XLA's CPU backend back.
        late = jnp.isnan(x[(0,) * x.ndim]).astype(jnp.int8)
        product = dense(x, (self.values + late).astype(x.dtype), dtype)
        scale = self.scale.astype(dtype)
        return product * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))

    def rows(self, ids: Int[Array, "*N"]) -> Float[Array, "*N in_dim"]:
        """Rows of an embedding table ``[V, D]``."""
        return self.values[ids].astype(self.dtype) * self.scale[ids][..., None]


@struct.dataclass
class Rounded(Weight):
    """A float32 weight whose products round both factors to bfloat16, for training.

    Sums, results and gradients stay float32, on the way forward and back, which a CPU
    with matrix units for bfloat16 (AMX) computes four times as fast as a float32
    product. Bfloat16 results would be slower than either: XLA's CPU backend widens
    their factors first.

    Attributes:
        values: the weight, unrounded.
    """

    values: Float[Array, "*out in_dim"]

    def __getitem__(self, index: Any) -> Rounded:
        """Some of its outputs."""
        return Rounded(self.values[index])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of what it makes."""
        return self.values.dtype

    def multiply(self, x: Float[Array, "*rows in_dim"], dtype: DTypeLike) -> Array:
        """The product, its sums in float32."""
        return _rounded_product(x, self.values).astype(dtype)


def rounded(model: Any) -> Any:
    """The same model with `Rounded` projections, to compute a step of training with.

    What is no matrix, such as the scales of norms, and the tables of relative biases
    stay as they are.

    Args:
        model: any pytree of arrays whose matrices multiply through `dense`.
    """

    def wrap(path: Any, leaf: jax.Array) -> jax.Array | Rounded:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        table = ".bias" in jax.tree_util.keystr(path)
        return Rounded(leaf) if floating and leaf.ndim >= 2 and not table else leaf

    return jax.tree_util.tree_map_with_path(wrap, model)


@jax.custom_vjp
def _rounded_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _contract(x.astype(_HALF), weight.astype(_HALF), jnp.float32)


def _rounded_forward(
    x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # An empty array carries the type of x to the way back.
    kept = x.astype(_HALF), weight.astype(_HALF), jnp.zeros(0, x.dtype)
    return _contract(*kept[:2], jnp.float32), kept


def _rounded_backward(
    kept: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight, like = kept
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
    by_row = gradient.astype(_HALF).reshape(rows.shape[0], matrix.shape[0])

    def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
        dims = ((axes[:1], axes[1:]), ((), ()))
        return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)

    # Not through transposed factors: XLA would copy them.
    of_x = product(by_row, matrix, (1, 0)).reshape(x.shape)
    of_weight = product(by_row, rows, (0, 0)).reshape(weight.shape)
    return of_x.astype(like.dtype), of_weight


_rounded_product.defvjp(_rounded_forward, _rounded_backward)


def dense(
    x: Float[Array, "*rows in_dim"],
    weight: Float[Array, "*out in_dim"] | Weight,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*any"]:
    """``x @ weight.T`` over the last axis of both.

    Args:
        x: ``[..., in]`` activations.
        weight: ``[*out, in]``, or what stands for one; several output axes (q, k, v)
            make one product.
        dtype: of the result, sums included; default: that of `x`.

    Returns:
        ``[..., *out]``.
    """
    dtype = x.dtype if dtype is None else dtype
    if isinstance(weight, Weight):
        return weight.multiply(x, dtype)
    plain = functools.partial(_contract, dtype=dtype)
    if math.prod(x.shape[:-1]) > _MAX_STREAMED_ROWS:
        return plain(x, weight)
    if x.dtype == weight.dtype == _HALF:
        form = _half
    elif _on_mesh():
        return plain(x, weight)
    else:
        form = _unroll if _small(x, weight) else _stream_weights
    on_cpu = functools.partial(form, dtype=dtype)
    return lax.platform_dependent(x, weight, cpu=on_cpu, default=plain)
