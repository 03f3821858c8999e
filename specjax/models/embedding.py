"""Rows of an embedding table, with a gradient that is summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.dense import Int8, Rounded


def look_up(
    table: Float[Array, "V D"] | Int8 | Rounded, ids: Int[Array, "*N"]
) -> Float[Array, "*N D"]:
    """Row ``ids[i]`` of the table for each i.

    The gradient of a row is a sum over the places where its id stands. In bfloat16 such
    a sum stops growing once it is 256 times as large as what is added: with plain
    indexing the gradient of 37,000 tokens was 30% off.

    Args:
        table: the embedding; one of whole numbers has no gradient.
        ids: of the rows.
    """
    if isinstance(table, Int8):
        return table.rows(ids)
    return _look_up(table.values if isinstance(table, Rounded) else table, ids)


@jax.custom_vjp
def _look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return _rows(table, ids)


def _rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    if table.dtype != jnp.bfloat16:
        return table[ids]

    def as_bits(table: jax.Array, ids: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
        return jax.lax.bitcast_convert_type(bits[ids], jnp.bfloat16)

    # XLA's CPU backend would look up float32 rows, of a wide copy of the whole table.
    return jax.lax.platform_dependent(
        table, ids, cpu=as_bits, default=lambda table, ids: table[ids]
    )


def _forward(
    table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rows(table, ids), (table, ids)


def _backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    table, ids = kept
    zeros = jnp.zeros(table.shape, jnp.float32)
    summed = zeros.at[ids].add(gradient.astype(jnp.float32))
    return summed.astype(table.dtype), None


_look_up.defvjp(_forward, _backward)
