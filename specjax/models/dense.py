"""Matrix products with stored ``[out, in]`` weights, in the form each platform likes.

XLA's CPU backend reads weights at a third of the memory bandwidth when a product of
2-16 rows is written ``x @ w.T``; written ``(w @ x.T).T`` behind optimisation barriers
(which keep the algebraic simplifier from undoing it) it reads them near full speed.
Other platforms, and products of many rows, take the plain form. Every projection of a
model goes through here, so that this choice stands in one place.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Above this many rows a product is bound by arithmetic, and the plain form is faster.
_MAX_STREAMED_ROWS = 32


def _contract(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, preferred_element_type=dtype)


def _stream_weights(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    rows = weight.reshape(-1, weight.shape[-1])
    product = jnp.matmul(rows, columns, preferred_element_type=dtype)
    return lax.optimization_barrier(product).T.reshape(x.shape[:-1] + weight.shape[:-1])


def dense(
    x: Float[Array, "*rows in_dim"],
    weight: Float[Array, "*out in_dim"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*any"]:
    """``x @ weight.T`` over the last axis of both.

    Args:
        x: ``[..., in]`` activations.
        weight: ``[*out, in]``; several output axes (q, k, v) make one product.
        dtype: of the result, sums included; default: that of `x`.

    Returns:
        ``[..., *out]``.
    """
    dtype = x.dtype if dtype is None else dtype
    plain = functools.partial(_contract, dtype=dtype)
    if math.prod(x.shape[:-1]) > _MAX_STREAMED_ROWS:
        return plain(x, weight)
    streaming = functools.partial(_stream_weights, dtype=dtype)
    return lax.platform_dependent(x, weight, cpu=streaming, default=plain)
