"""Verification rules: which drafted tokens stand, and which token follows them.

A rule is written for one sequence, arrays in and `VerifyOutput` out; the caller vmaps.
Row i of the draft's and of the target's laws are both "after fed token i", and fed
token 0 is the last committed one, so drafted token i (from 0) was drawn from draft row
i and is judged against target row i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax import trees
from specjax.errors import InputError
from specjax.sampling import draw, residual
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
    """

    rule: Rule = struct.field(pytree_node=False)
    params: Any = None
    needs_law: bool = struct.field(pytree_node=False, default=True)
    trees: bool = struct.field(pytree_node=False, default=False)
    lossless: bool = struct.field(pytree_node=False, default=True)
    noise: str = struct.field(pytree_node=False, default="step")


def token_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Accepts token by token: Leviathan et al. 2023, Algorithm 1.

    The test is ``u * q(x) < p(x)``: no division and no epsilon, so that a token of zero
    target probability never passes.
    """
    del params
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    uniforms = _uniforms(noise, gamma)
    p = scored.law.at(_pad_one(block.tokens))[:gamma]
    accepted = (uniforms * _law(block).at(block.tokens) < p) & _real(block)
    num_accepted = jnp.sum(jnp.cumprod(accepted, dtype=jnp.int32))
    target = scored.law.row(num_accepted, vocab_size)
    draft = _draft_row(block, num_accepted, vocab_size)
    # After a rejection: [p - q]+. After the whole block: q counts as 0, so p itself.
    weights = residual(target, draft)
    key = noise.key(0, num_accepted + 1)
    return VerifyOutput(num_accepted=num_accepted, next_token=draw(key, weights))


def block_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Accepts the longest passing prefix: Sun et al. 2025 (arXiv:2403.10444).

    Never accepts fewer tokens than `token_rule` in expectation, and is optimal among
    rules for one draft path. It takes the *last* success of independent tests, and
    needs all rows of both laws.
    """
    del params
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    p = scored.law.at(_pad_one(block.tokens))[:gamma]
    q = _law(block).at(block.tokens)

    def extend(joint: Array, probs: tuple[Array, Array]) -> tuple[Array, Array]:
        # min(joint * p / q, 1). A drawn token has q > 0; one past the block may not.
        p_i, q_i = probs
        ratio = joint * p_i / jnp.where(q_i > 0, q_i, 1.0)
        joint = jnp.minimum(ratio, 1.0)
        return joint, joint

    _, joint = jax.lax.scan(extend, jnp.float32(1.0), (p, q))  # joint[i]: i + 1 tokens
    # A prefix that is shorter than the block can still grow, by the residual's mass at
    # the row that follows it; the whole block passes with its joint ratio.
    following_p = scored.law.dense(vocab_size)[1:gamma]
    following_q = _law(block).dense(vocab_size)[1:]
    grow = jnp.maximum(joint[: gamma - 1, None] * following_p - following_q, 0.0)
    mass = jnp.sum(grow, axis=-1)
    room = mass + 1.0 - joint[: gamma - 1]
    passing = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
    length = jnp.arange(1, gamma + 1)
    threshold = jnp.where(length == block.length, joint, _pad_one(passing)[:gamma])
    passed = (_uniforms(noise, gamma) < threshold) & _real(block)
    num_accepted = jnp.max(jnp.where(passed, length, 0)).astype(jnp.int32)

    whole = num_accepted == block.length
    scale = jnp.concatenate([jnp.ones(1), joint])[num_accepted]
    target = scored.law.row(num_accepted, vocab_size)
    draft = _draft_row(block, num_accepted, vocab_size)
    weights = jnp.where(whole, target, residual(scale * target, draft))
    key = noise.key(0, num_accepted + 1)
    return VerifyOutput(num_accepted=num_accepted, next_token=draw(key, weights))


def greedy_rule(best: Int[Array, " T"], block: DraftBlock, gamma: int) -> VerifyOutput:
    """What every lossless rule becomes when the target's laws are point masses.

    Args:
        best: the target's id after each fed token.
        block: the drafted tokens, a chain or a tree.
        gamma: the deepest draft.
    """
    if block.parents is not None:
        wanted = block.tokens == best[block.parents[1:]]
        chosen = jnp.concatenate([jnp.zeros(1, bool), wanted & _real(block)])
        path, length = trees.follow(block.parents, chosen, gamma)
        at = jnp.where(length > 0, path[jnp.maximum(length - 1, 0)], 0)
        return VerifyOutput(num_accepted=length, next_token=best[at], path=path)
    accepted = (block.tokens == best[:gamma]) & _real(block)
    num_accepted = jnp.sum(jnp.cumprod(accepted, dtype=jnp.int32))
    return VerifyOutput(num_accepted=num_accepted, next_token=best[num_accepted])


token_verify = Verifier(token_rule)
block_verify = Verifier(block_rule)


def _uniforms(noise: Noise, gamma: int) -> Array:
    """One uniform number in [0, 1) per drafted token; node 0 is kept for the draw."""

    def uniform(node: Array) -> Array:
        return jax.random.uniform(noise.key(node, node), dtype=jnp.float32)

    return jax.vmap(uniform)(jnp.arange(1, gamma + 1))


def _real(block: DraftBlock) -> Array:
    return jnp.arange(block.tokens.shape[0]) < block.length


def _pad_one(values: Array) -> Array:
    return jnp.concatenate([values, jnp.zeros(1, values.dtype)])


def _law(block: DraftBlock) -> Law:
    if block.law is None:
        raise InputError("this rule reads the draft's law, and the block has none")
    return block.law


def _draft_row(block: DraftBlock, index: Array, vocab_size: int) -> Array:
    """Draft row `index`, or zeros where no token was drafted there."""
    last = block.tokens.shape[0] - 1
    row = _law(block).row(jnp.minimum(index, last), vocab_size)
    return jnp.where(index < block.length, row, 0.0)
