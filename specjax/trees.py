"""The shape of a tree of drafted tokens: who stands below whom.

A block of N drafted nodes is fed with the last committed token as node 0, so a tree is
``parents`` of length N + 1: ``parents[0] = -1``, and ``parents[i] < i`` for the rest. A
chain has ``parents[i] = i - 1``. All functions are for one sequence; callers vmap.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.errors import InputError


def check_parents(parents: tuple[int, ...]) -> None:
    """Refuses what is no tree, or one whose nodes do not stand level by level.

    Args:
        parents: of each node, -1 at the root.

    Raises:
        InputError: naming the first node that is wrong.
    """
    if len(parents) < 2 or parents[0] != -1:
        raise InputError(
            f"parents is {parents}: node 0 is the root, with parent -1, and at least "
            "one node stands below it"
        )
    for node, (before, parent) in enumerate(itertools.pairwise(parents), start=1):
        if not 0 <= parent < node:
            raise InputError(
                f"parents[{node}] is {parent}: a node stands below one of those before "
                f"it, 0 to {node - 1}"
            )
        if parent < before:
            raise InputError(
                f"parents[{node}] is {parent}, after {before}: nodes are numbered "
                "level by level, and siblings side by side, so parents never fall"
            )


def levels(parents: tuple[int, ...]) -> tuple[range, ...]:
    """The nodes of each depth, the root first.

    Args:
        parents: that `check_parents` has let pass.
    """
    found, first = [range(0, 1)], 1
    while first < len(parents):
        last = sum(parent < first for parent in parents)
        found.append(range(first, last))
        first = last
    return tuple(found)


def depth(parents: tuple[int, ...]) -> int:
    """Steps from the root to the deepest node.

    Args:
        parents: that `check_parents` has let pass.
    """
    return len(levels(parents)) - 1


def ancestors(parents: Int[Array, " M"]) -> Bool[Array, "M M"]:
    """Whether node j is node i or stands on the path from the root to it, ``[i, j]``.

    Args:
        parents: of each node, -1 at the root.
    """
    nodes = parents.shape[0]
    ids = jnp.arange(nodes, dtype=jnp.int32)
    reach = (parents[:, None] == ids[None]) | (ids[:, None] == ids[None])
    # Each squaring doubles how far up a node sees.
    for _ in range(max(nodes - 1, 1).bit_length()):
        wide = reach.astype(jnp.float32)
        reach = wide @ wide > 0
    return reach


def depths(parents: Int[Array, " M"]) -> Int[Array, " M"]:
    """Steps from the root to each node."""
    return jnp.sum(ancestors(parents), axis=-1, dtype=jnp.int32) - 1


def follow(
    parents: Int[Array, " M"], chosen: Bool[Array, " M"], gamma: int
) -> tuple[Int[Array, " G"], Int[Array, ""]]:
    """Walks from the root down through chosen nodes, to the first child of several.

    Args:
        parents: of each node, -1 at the root.
        chosen: nodes that may be walked to; the root's own entry is not read.
        gamma: the longest walk.

    Returns:
        The nodes walked to, padded with 0, and how many they are.
    """
    nodes = parents.shape[0]
    ids = jnp.arange(nodes, dtype=jnp.int32)
    at, path, length = jnp.int32(0), [], jnp.int32(0)
    for _ in range(gamma):
        below = (parents == at) & chosen & (ids > 0)
        found = jnp.any(below)
        child = jnp.argmax(below).astype(jnp.int32)
        path.append(jnp.where(found, child, 0))
        length = length + found.astype(jnp.int32)
        # Nobody's parent is `nodes`: a walk that has ended stays so.
        at = jnp.where(found, child, nodes)
    return jnp.stack(path), length


def write_paths(
    tokens: Int[Array, " L"],
    length: Int[Array, ""],
    drafted: Int[Array, " N"],
    parents: Int[Array, " M"],
) -> tuple[Int[Array, "M L"], Int[Array, " M"]]:
    """A buffer per node: the text so far, then the path down to that node.

    Args:
        tokens: the buffer.
        length: of the text so far; its last token is the root.
        drafted: tokens of nodes 1 and on.
        parents: of each node, -1 at the root.

    Returns:
        The buffers, and the length of the text in each.
    """
    above, depth = ancestors(parents), depths(parents)
    nodes, size = depth.shape[0], tokens.shape[0]
    # Every row takes its ancestors' tokens at their depths; other nodes are dropped.
    columns = jnp.where(above, (length - 1 + depth)[None], size)
    own = jnp.concatenate([tokens[length - 1][None], drafted])
    rows = jnp.broadcast_to(jnp.arange(nodes)[:, None], columns.shape)
    buffers = jnp.broadcast_to(tokens[None], (nodes, size))
    values = jnp.broadcast_to(own[None], columns.shape)
    return buffers.at[rows, columns].set(values, mode="drop"), length + depth
