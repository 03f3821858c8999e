"""Traversal verification: whole paths, from the leaves of a tree to its root."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import trees
from specjax.types import DraftBlock, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    after_rejection,
    judged,
    normalised,
    verdict,
)


@struct.dataclass
class _Tree:
    """What is left of the tree.

    Attributes:
        alive: nodes that were not rejected; the root always is.
        passing: probability that the path down to each node stands.
        p: what is left of the target's law after each node.
        q: the law of the next child of each node.
        leaf: the last one looked at.
        accepted: whether its path stands.
    """

    alive: Bool[Array, " M"]
    passing: Float[Array, " M"]
    p: Float[Array, "M V"]
    q: Float[Array, "M V"]
    leaf: Int[Array, ""]
    accepted: Bool[Array, ""]


def traversal_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Tries the leftmost leaf's whole path, then the next: arXiv:2505.12398.

    A leaf stands with the capped joint ratio of its path. If it does not, its parent
    keeps the residual [a p - q]+ of that ratio a, of mass S, and passes with
    S / (S + 1 - a): not with a ratio of masses, as public code has it, which is biased.
    For children that were drawn without replacement; a chain is `block_rule`.
    """
    del params
    nodes = block.tokens.shape[0]
    parents, p, q, present, coins = judged(noise, block, scored)
    coins = jnp.pad(coins, (1, 0))  # the root passes surely
    above = trees.ancestors(parents)
    tokens = jnp.pad(block.tokens, (1, 0))

    def pass_down(tree: _Tree, root: Array) -> _Tree:
        """Probabilities below a node, from its own."""

        def visit(passing: Array, node: Array) -> tuple[Array, None]:
            up, token = parents[node], tokens[node]
            drawn = tree.q[up, token]
            ratio = tree.p[up, token] / jnp.where(drawn > 0, drawn, 1.0)
            own = jnp.minimum(passing[up] * ratio, 1.0)
            below = above[node, root] & (node != root)
            return passing.at[node].set(jnp.where(below, own, passing[node])), None

        ids = jnp.arange(1, nodes + 1, dtype=jnp.int32)
        return tree.replace(passing=jax.lax.scan(visit, tree.passing, ids)[0])

    def leftmost_leaf(tree: _Tree) -> Array:
        path, length = trees.follow(parents, tree.alive, nodes)
        return jnp.where(length > 0, path[jnp.maximum(length - 1, 0)], 0)

    def step(tree: _Tree) -> Any:
        leaf = leftmost_leaf(tree)
        accepted = (coins[leaf] < tree.passing[leaf]) | (leaf == 0)
        up = jnp.maximum(parents[leaf], 0)
        scale = tree.passing[up]
        rest = jnp.maximum(scale * tree.p[up] - tree.q[up], 0.0)
        mass = jnp.sum(rest)
        rejected = tree.replace(
            alive=tree.alive.at[leaf].set(False),
            passing=tree.passing.at[up].set(after_rejection(mass, scale)),
            p=tree.p.at[up].set(jnp.where(mass > 0, normalised(rest), tree.p[up])),
            q=tree.q.at[up].set(normalised(tree.q[up].at[tokens[leaf]].set(0.0))),
        )
        rejected = pass_down(rejected, up)
        return jax.tree.map(
            lambda old, new: jnp.where(accepted, old, new), tree, rejected
        ).replace(leaf=leaf, accepted=accepted)

    start = _Tree(
        alive=jnp.pad(present, (1, 0), constant_values=True),
        passing=jnp.ones(nodes + 1, jnp.float32),
        p=p,
        q=q,
        leaf=jnp.int32(0),
        accepted=jnp.bool_(False),
    )
    end = jax.lax.while_loop(
        lambda tree: ~tree.accepted, step, pass_down(start, jnp.int32(0))
    )
    return verdict(noise, block, above[end.leaf][1:], end.p[end.leaf])


traversal_verify = Verifier(traversal_rule, trees=True, siblings=("distinct",))
