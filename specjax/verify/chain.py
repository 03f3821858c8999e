"""Rules for one drafted path: token by token, and the whole block at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.sampling import draw, residual
from specjax.types import DraftBlock, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    after_rejection,
    draft_row,
    first_failure,
    law_of,
    pad_one,
    real_nodes,
    uniforms,
)


def token_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Accepts token by token: Leviathan et al. 2023, Algorithm 1.

    The test is ``u * q(x) < p(x)``: no division and no epsilon, so that a token of zero
    target probability never passes.
    """
    del params
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    coins = uniforms(noise, gamma)
    p = scored.law.at(pad_one(block.tokens))[:gamma]
    accepted = coins * law_of(block).at(block.tokens) < p
    num_accepted = first_failure(accepted, block)
    target = scored.law.row(num_accepted, vocab_size)
    draft = draft_row(block, num_accepted, vocab_size)
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
    p = scored.law.at(pad_one(block.tokens))[:gamma]
    q = law_of(block).at(block.tokens)

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
    following_q = law_of(block).dense(vocab_size)[1:]
    grow = jnp.maximum(joint[: gamma - 1, None] * following_p - following_q, 0.0)
    passing = after_rejection(jnp.sum(grow, axis=-1), joint[: gamma - 1])
    length = jnp.arange(1, gamma + 1)
    threshold = jnp.where(length == block.length, joint, pad_one(passing)[:gamma])
    passed = (uniforms(noise, gamma) < threshold) & real_nodes(block)
    num_accepted = jnp.max(jnp.where(passed, length, 0)).astype(jnp.int32)

    whole = num_accepted == block.length
    scale = jnp.concatenate([jnp.ones(1), joint])[num_accepted]
    target = scored.law.row(num_accepted, vocab_size)
    draft = draft_row(block, num_accepted, vocab_size)
    weights = jnp.where(whole, target, residual(scale * target, draft))
    key = noise.key(0, num_accepted + 1)
    return VerifyOutput(num_accepted=num_accepted, next_token=draw(key, weights))


token_verify = Verifier(token_rule)
block_verify = Verifier(block_rule)
