"""What all verification rules share: the records, and small steps of them.

A rule is written for one sequence, arrays in and `VerifyOutput` out; the caller vmaps.
Row i of the draft's and of the target's laws are both "after fed token i", and fed
token 0 is the last committed one, so drafted token i (from 0) of a chain was drawn from
draft row i and is judged against target row i. In a tree, node i (from 1) was drawn
from the draft row of its parent and is judged against its parent's target row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import trees
from specjax.errors import InputError
from specjax.sampling import draw
from specjax.types import DraftBlock, Law, Noise


@struct.dataclass
class Scored:
    """The target's verdict on a fed block of one sequence.

    Attributes:
        law: N + 1 rows, row i after fed token i.
        logits: ``float32[N + 1, V]`` raw logits, for rules that are knowingly lossy.
    """

    law: Law
    logits: Float[Array, "T V"]


@struct.dataclass
class VerifyOutput:
    """What a rule decides for one sequence.

    Attributes:
        num_accepted: how many drafted tokens stand.
        next_token: the token that follows them (corrected or bonus).
        path: nodes of the accepted tokens, from the top of the tree down; the first
            `num_accepted` of gamma are valid. None: a chain's own order.
    """

    num_accepted: Int[Array, ""]
    next_token: Int[Array, ""]
    path: Int[Array, " G"] | None = None


Rule = Callable[[Noise, DraftBlock, Scored, Any], VerifyOutput]


@struct.dataclass
class Verifier:
    """A verification rule with its needs. A new rule is one function and one line.

    Attributes:
        rule: ``(noise, block, scored, params) -> VerifyOutput``, at module level.
        params: traced settings of the rule.
        needs_law: the rule reads the draft's laws.
        trees: the rule takes trees of drafts; else chains alone.
        lossless: the emitted tokens follow the target's law exactly.
        noise: "step", or "position" for rules that share noise with the drafter.
        siblings: how the children of a node must have been drawn, one of
            `types.SIBLINGS` or several; None: in any way.
    """

    rule: Rule = struct.field(pytree_node=False)
    params: Any = None
    needs_law: bool = struct.field(pytree_node=False, default=True)
    trees: bool = struct.field(pytree_node=False, default=False)
    lossless: bool = struct.field(pytree_node=False, default=True)
    noise: str = struct.field(pytree_node=False, default="step")
    siblings: tuple[str, ...] | None = struct.field(pytree_node=False, default=None)

    @property
    def usual_siblings(self) -> str:
        """How the children of a node are drawn where nothing else is asked."""
        return self.siblings[0] if self.siblings else "distinct"


def greedy_rule(best: Int[Array, " T"], block: DraftBlock, gamma: int) -> VerifyOutput:
    """Keeps what equals the target's own token after the token above it.

    What every lossless rule becomes when the target's laws are point masses.

    Args:
        best: the target's own id after each fed token.
        block: the drafted tokens, a chain or a tree.
        gamma: the deepest draft.
    """
    if block.parents is not None:
        wanted = block.tokens == best[block.parents[1:]]
        chosen = jnp.concatenate([jnp.zeros(1, bool), wanted & real_nodes(block)])
        path, length = trees.follow(block.parents, chosen, gamma)
        at = jnp.where(length > 0, path[jnp.maximum(length - 1, 0)], 0)
        return VerifyOutput(num_accepted=length, next_token=best[at], path=path)
    num_accepted = first_failure(block.tokens == best[:gamma], block)
    return VerifyOutput(num_accepted=num_accepted, next_token=best[num_accepted])


def uniforms(noise: Noise, gamma: int) -> Array:
    """One uniform number in [0, 1) per drafted token; node 0 is kept for the draw."""

    def uniform(node: Array) -> Array:
        return jax.random.uniform(noise.key(node, node), dtype=jnp.float32)

    return jax.vmap(uniform)(jnp.arange(1, gamma + 1))


def real_nodes(block: DraftBlock) -> Array:
    return jnp.arange(block.tokens.shape[0]) < block.length


def first_failure(accepted: Array, block: DraftBlock) -> Array:
    """How many tokens of a chain stand before the first that does not."""
    return jnp.sum(jnp.cumprod(accepted & real_nodes(block), dtype=jnp.int32))


def after_rejection(
    mass: Float[Array, "*N"], passing: Float[Array, "*N"]
) -> Float[Array, "*N"]:
    """Chance that a prefix stands, given that no longer one did.

    Args:
        mass: of the residual [passing p - q]+ after the prefix.
        passing: the chance before: its capped joint ratio.
    """
    room = mass + 1.0 - passing
    # No room: a rejection had probability 0, up to rounding.
    return jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)


def pad_one(values: Array) -> Array:
    return jnp.concatenate([values, jnp.zeros(1, values.dtype)])


def law_of(block: DraftBlock) -> Law:
    if block.law is None:
        raise InputError("this rule reads the draft's law, and the block has none")
    return block.law


def draft_row(block: DraftBlock, index: Array, vocab_size: int) -> Array:
    """Draft row `index`, or zeros where no token was drafted there."""
    last = block.tokens.shape[0] - 1
    row = law_of(block).row(jnp.minimum(index, last), vocab_size)
    return jnp.where(index < block.length, row, 0.0)


def tree_of(block: DraftBlock) -> Int[Array, " M"]:
    """The block's parents; a chain's own where it is one."""
    if block.parents is None:
        return jnp.arange(-1, block.tokens.shape[0], dtype=jnp.int32)
    return block.parents


def draft_rows(block: DraftBlock, vocab_size: int) -> Float[Array, "M V"]:
    """The draft's law after each node; zeros where the block has no row for one."""
    rows = law_of(block).dense(vocab_size)
    missing = block.tokens.shape[0] + 1 - rows.shape[0]
    return jnp.pad(rows, ((0, missing), (0, 0)))


class Judged(NamedTuple):
    """What a rule of rejection looks at in a tree.

    Attributes:
        parents: of each node.
        p: the target's law after each node.
        q: the draft's.
        present: nodes that hold a token which was really drawn. A law of fewer tokens
            than a node has children leaves some without one: they count as absent.
        coins: a uniform number for each drafted node.
    """

    parents: Int[Array, " M"]
    p: Float[Array, "M V"]
    q: Float[Array, "M V"]
    present: Bool[Array, " N"]
    coins: Float[Array, " N"]


def judged(noise: Noise, block: DraftBlock, scored: Scored) -> Judged:
    """The tree of a block, a chain's too, with both laws and the randomness."""
    vocab_size = scored.logits.shape[-1]
    parents, q = tree_of(block), draft_rows(block, vocab_size)
    return Judged(
        parents=parents,
        p=scored.law.dense(vocab_size),
        q=q,
        present=real_nodes(block) & (q[parents[1:], block.tokens] > 0),
        coins=uniforms(noise, block.tokens.shape[0]),
    )


def verdict(
    noise: Noise,
    block: DraftBlock,
    accepted: Bool[Array, " N"],
    weights: Float[Array, " V"],
) -> VerifyOutput:
    """The verdict on nodes that make one path down from the root.

    Args:
        noise: of the step.
        block: the drafted tokens.
        accepted: the nodes that stand; a child's number is above its parent's.
        weights: of the token that follows them, which is drawn here.
    """
    number = jnp.sum(accepted, dtype=jnp.int32)
    next_token = draw(noise.key(0, number + 1), weights)
    if block.parents is None:
        return VerifyOutput(num_accepted=number, next_token=next_token)
    nodes = accepted.shape[0]
    place = jnp.where(accepted, jnp.cumsum(accepted) - 1, nodes)
    ids = jnp.arange(1, nodes + 1, dtype=jnp.int32)
    path = jnp.zeros(nodes, jnp.int32).at[place].set(ids, mode="drop")
    return VerifyOutput(num_accepted=number, next_token=next_token, path=path)


def normalised(weights: Float[Array, " V"]) -> Float[Array, " V"]:
    """Weights as a law; all zeros stay so."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1.0)
