"""Matrix products with stored ``[out, in]`` weights, in the form each platform likes.

XLA's CPU backend reads weights at a third of the memory bandwidth when a product of
2-16 rows is written ``x @ w.T``; written ``(w @ x.T).T`` behind optimisation barriers
(which keep the algebraic simplifier from undoing it) it reads them near full speed.
Other platforms, and products of many rows, take the plain form. Every projection of a
model goes through here, so that this choice stands in one place.
"""

from __future__ import annotations

import math

import jax
from jax import lax
from jaxtyping import Array, Float

# Above this many rows a product is bound by arithmetic, and the plain form is faster.
_MAX_STREAMED_ROWS = 32


def _contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    dims = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims)


def _stream_weights(x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    columns = lax.optimization_barrier(rows.T)
    product = lax.optimization_barrier(weight.reshape(-1, weight.shape[-1]) @ columns)
    return product.T.reshape(x.shape[:-1] + weight.shape[:-1])


def dense(
    x: Float[Array, "*rows in_dim"], weight: Float[Array, "*out in_dim"]
) -> Float[Array, "*any"]:
    """``x @ weight.T`` over the last axis of both.

    Args:
        x: ``[..., in]`` activations.
        weight: ``[*out, in]``; several output axes (q, k, v) make one product.

    Returns:
        ``[..., *out]`` in the type of `x`.
    """
    if math.prod(x.shape[:-1]) > _MAX_STREAMED_ROWS:
        return _contract(x, weight)
    return lax.platform_dependent(x, weight, cpu=_stream_weights, default=_contract)
