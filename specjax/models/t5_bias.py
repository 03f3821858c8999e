"""T5's relative position bias: where a query stands to a key, and what that adds.

Position lives here alone, never in the keys: a drafted path of a tree is made one with
the text before it by moving its keys and values, without touching them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import trees
from specjax.errors import InputError

# Added to scores of invisible keys. Finite, so that a row that sees nothing (a padding
# row of a batch) stays free of NaN; exp underflows to exactly 0 beside any visible key.
MASKED = -1e9


def relative_position_bucket(
    relative_position: np.ndarray,
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> np.ndarray:
    """Bucket of ``key_position - query_position``.

    Computed with NumPy on the host: the encoder's offsets 16, 32 and 64 sit exactly on
    a boundary, where a device's logarithm that is off by one ulp flips the bucket.

    Args:
        relative_position: integers of any shape.
        bidirectional: encoder (both directions) or decoder (the past only).
        num_buckets: buckets in all.
        max_distance: distance from which the last bucket is used.

    Returns:
        int32 buckets of the same shape.
    """
    relative_position = np.asarray(relative_position)
    offset = np.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(relative_position > 0, num_buckets, 0)
        distance = np.abs(relative_position)
    else:
        distance = np.maximum(-relative_position, 0)
    exact = num_buckets // 2
    # The tiny summand keeps offsets that fall on a boundary in the upper bucket.
    log_ratio = np.log(np.maximum(distance, 1) / exact + 1e-9)
    large = exact + log_ratio / math.log(max_distance / exact) * (num_buckets - exact)
    large = np.minimum(large.astype(np.int64), num_buckets - 1)
    return (offset + np.where(distance < exact, distance, large)).astype(np.int32)


@struct.dataclass
class Above:
    """What the fed nodes of a tree see of its nodes so far.

    Attributes:
        seen: ``bool[B, T, start + T]`` ancestors, and the node itself; B is 1 where all
            rows have one tree.
        steps: ``int32[B, T, start + T]`` how far up they are.
        start: static; nodes that earlier calls have fed, in slots from the base on.
    """

    seen: Bool[Array, "#B T N"]
    steps: Int[Array, "#B T N"]
    start: int = struct.field(pytree_node=False)


@struct.dataclass
class Fed:
    """Where the tokens of one decoder call stand.

    Attributes:
        position: ``int32[B, T]`` tokens before each, on its own path.
        base: ``int32[B]`` slots below are visible to all.
        above: within the tree; None: a chain.
    """

    position: Int[Array, "B T"]
    base: Int[Array, " B"]
    above: Above | None = None


def geometry(
    length: Int[Array, " B"],
    fed: int,
    parents: Int[Array, "#B M"] | None,
    start: int,
) -> Fed:
    """Where `fed` tokens stand that come after `length` slots.

    Args:
        length: valid slots before this call.
        fed: T, the tokens of this call.
        parents: of all nodes of the tree, those of later calls included, in one row if
            it is the same in all; None: a chain.
        start: nodes that earlier calls have fed.

    Raises:
        InputError: `start` without a tree.
    """
    if start and parents is None:
        raise InputError(f"start is {start} and there are no parents: it needs a tree")
    base = length - start
    if parents is None:
        offset = jnp.arange(fed, dtype=jnp.int32)[None]
        return Fed(position=length[:, None] + offset, base=length)
    seen = jax.vmap(trees.ancestors)(parents)[:, start : start + fed, : start + fed]
    depth = jax.vmap(trees.depths)(parents)
    own = depth[:, start : start + fed]
    steps = jnp.maximum(own[:, :, None] - depth[:, None, : start + fed], 0)
    above = Above(seen=seen, steps=steps, start=start)
    return Fed(position=base[:, None] + own, base=base, above=above)


def past_bias(
    table: Float[Array, "buckets H"], fed: Fed, size: int, max_distance: int
) -> Float[Array, "B H T L"]:
    """Bias towards the slots of a cache of `size`; what may not be seen is masked."""
    place = jnp.arange(size, dtype=jnp.int32)[None, None]
    by_distance = _by_distance(table, size, max_distance)
    distance = fed.position[:, :, None] - place
    visible = place < fed.base[:, None, None]
    above = fed.above
    if above is not None and above.start:
        node = place - fed.base[:, None, None]
        inside = (node >= 0) & (node < above.start)
        index = jnp.broadcast_to(
            jnp.clip(node, 0, above.start - 1), inside.shape[:1] + distance.shape[1:]
        )
        seen = jnp.take_along_axis(above.seen, index, axis=2)
        steps = jnp.take_along_axis(above.steps, index, axis=2)
        visible = visible | (inside & seen)
        distance = jnp.where(inside, steps, distance)
    bias = jnp.moveaxis(by_distance[:, jnp.clip(distance, 0, size - 1)], 0, 1)
    return jnp.where(visible[:, None], bias, MASKED)


def present_bias(
    table: Float[Array, "buckets H"], fed: Fed, max_distance: int
) -> Float[Array, "#B H T T"]:
    """Bias between the tokens that are fed in one call."""
    count, above = fed.position.shape[1], fed.above
    if above is None:
        place = np.arange(count)
        distance = place[:, None] - place[None, :]
        buckets = _decoder_buckets(table, -distance, max_distance)
        bias = table[buckets].transpose(2, 0, 1)
        return jnp.where(distance[None] < 0, MASKED, bias)[None]
    by_distance = _by_distance(table, above.start + count, max_distance)
    bias = jnp.moveaxis(by_distance[:, above.steps[:, :, above.start :]], 0, 1)
    return jnp.where(above.seen[:, None, :, above.start :], bias, MASKED)


def _by_distance(table: jax.Array, size: int, max_distance: int) -> jax.Array:
    """``[H, size]`` bias of keys 0, 1, .. places back."""
    return table[_decoder_buckets(table, -np.arange(size), max_distance)].T


def _decoder_buckets(
    table: jax.Array, relative_position: np.ndarray, max_distance: int
) -> np.ndarray:
    return relative_position_bucket(
        relative_position,
        bidirectional=False,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
