"""Deliberately wrong rules and drafters, each a fault that real code has had.

Tests of exactness must accept the right ones and reject these. Which one is used is a
traced number, so that all of them share one compiled program.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.model import ModelDrafter
from specjax.sampling import draw, residual
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, VerifyOutput, block_rule, token_rule


def _parts(noise: Noise, block: DraftBlock, scored: Scored):
    """Uniforms, both laws as tables, and the drafted tokens' probabilities."""
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    nodes = jnp.arange(1, gamma + 1)
    uniforms = jax.vmap(lambda node: jax.random.uniform(noise.key(node, node)))(nodes)
    p = scored.law.dense(vocab_size)
    q = jnp.concatenate([block.law.dense(vocab_size), jnp.zeros((1, vocab_size))])
    places = jnp.arange(gamma)
    return uniforms, p, q, p[places, block.tokens], q[places, block.tokens]


def _first_failure(accepted: jax.Array, block: DraftBlock) -> jax.Array:
    real = jnp.arange(block.tokens.shape[0]) < block.length
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32)))


def _verdict(noise: Noise, num_accepted: jax.Array, weights: jax.Array):
    key = noise.key(0, num_accepted + 1)
    return VerifyOutput(num_accepted=num_accepted, next_token=draw(key, weights))


def epsilon_ratio(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Accepts with ``u <= p / (q + epsilon)``: at u = 0, whatever p is."""
    uniforms, p, q, p_x, q_x = _parts(noise, block, scored)
    num_accepted = _first_failure(uniforms <= p_x / (q_x + 1e-9), block)
    row = jnp.where(num_accepted < block.length, q[num_accepted], 0.0)
    return _verdict(noise, num_accepted, residual(p[num_accepted], row))


def _block(block, uniforms, p, q, p_x, q_x, raw_last) -> tuple[jax.Array, jax.Array]:
    """Block verification place by place: accepted tokens, and weights of the next."""
    joint, raw = jnp.float32(1.0), jnp.float32(1.0)
    num_accepted, scale = jnp.int32(0), jnp.float32(1.0)
    for i in range(block.tokens.shape[0]):
        ratio = p_x[i] / jnp.where(q_x[i] > 0, q_x[i], 1.0)
        joint, raw = jnp.minimum(joint * ratio, 1.0), raw * ratio
        mass = jnp.sum(jnp.maximum(joint * p[i + 1] - q[i + 1], 0.0))
        room = mass + 1.0 - joint
        passing = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
        whole = jnp.where(raw_last, raw, joint)
        passing = jnp.where(i + 1 == block.length, whole, passing)
        passed = (uniforms[i] < passing) & (i < block.length)
        num_accepted = jnp.where(passed, i + 1, num_accepted)
        scale = jnp.where(passed, joint, scale)
    row = jnp.where(num_accepted < block.length, q[num_accepted], 0.0)
    scale = jnp.where(num_accepted < block.length, scale, 1.0)
    return num_accepted, residual(scale * p[num_accepted], row)


def written_out_block(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Block verification, rightly: an independent second writing of it."""
    accepted, weights = _block(block, *_parts(noise, block, scored), raw_last=False)
    return _verdict(noise, accepted, weights)


WRONG_RULES = (
    "accept_equal",
    "target_as_residual",
    "shifted_residual",
    "one_uniform",
    "raw_last_block",
    "one_uniform_block",
)


def _wrong_rule(noise: Noise, block: DraftBlock, scored: Scored, which: jax.Array):
    """Number `which` of `WRONG_RULES`.

    accept_equal: accepts where a draw from p equals the draft (hence with probability
        p(x)), and follows a rejection with the residual.
    target_as_residual: draws from p after a rejection.
    shifted_residual: takes the residual's draft row one place late.
    one_uniform: judges the whole block by one uniform number.
    raw_last_block: the whole block passes with the uncapped ratio of the joints.
    one_uniform_block: block verification by one uniform number.
    """

    def named(*names: str) -> jax.Array:
        return functools.reduce(
            jnp.logical_or, [which == WRONG_RULES.index(name) for name in names]
        )

    uniforms, p, q, p_x, q_x = _parts(noise, block, scored)
    shared = jnp.broadcast_to(uniforms[:1], uniforms.shape)
    uniforms = jnp.where(named("one_uniform", "one_uniform_block"), shared, uniforms)
    bar = jnp.where(named("accept_equal"), 1.0, q_x)
    num_accepted = _first_failure(uniforms * bar < p_x, block)
    row = q[num_accepted + named("shifted_residual").astype(jnp.int32)]
    row = jnp.where(num_accepted < block.length, row, 0.0)
    row = jnp.where(named("target_as_residual"), 0.0, row)
    weights = residual(p[num_accepted], row)
    by_block = _block(block, uniforms, p, q, p_x, q_x, raw_last=named("raw_last_block"))
    blockwise = named("raw_last_block", "one_uniform_block")
    num_accepted = jnp.where(blockwise, by_block[0], num_accepted)
    return _verdict(noise, num_accepted, jnp.where(blockwise, by_block[1], weights))


RIGHT_RULES = ("token_rule", "block_rule")


def right_rule(noise, block, scored, which) -> VerifyOutput:
    """Number `which` of `RIGHT_RULES`, as the package has them."""
    token = functools.partial(token_rule, params=None)
    whole = functools.partial(block_rule, params=None)
    return jax.lax.switch(which, [token, whole], noise, block, scored)


def chosen_rule(noise, block, scored, which) -> VerifyOutput:
    """Number `which` of the right rules, then of the wrong ones."""
    first_wrong = len(RIGHT_RULES)
    return jax.lax.cond(
        which < first_wrong,
        lambda: right_rule(noise, block, scored, which),
        lambda: _wrong_rule(noise, block, scored, which - first_wrong),
    )


FLAWS = ("none", "keep", "drop", "argmax", "before_top_k", "position")


@struct.dataclass
class BestTwo:
    """A control: top-k of 2 without a sort, where it is on."""

    on: jax.Array

    def __call__(self, logits, tokens, length):
        better = jnp.sum(logits[None] > logits[:, None], axis=1)
        return jnp.where(self.on & (better >= 2), -jnp.inf, logits)


@struct.dataclass
class TwinDrafter:
    """A model drafter with one of `FLAWS`, by number.

    none, keep: right. keep: blocks of varying length: nothing after the vocabulary's
        last id; else they end with their first 0, which is verified.
    drop: the same, but that 0 is thrown away.
    argmax: drafts the most probable id, and says that it drew it.
    before_top_k: draws from the best two, and reports the law before truncation.
    position: a place that is drafted again sees the same noise again.
    """

    inner: ModelDrafter
    flaw: jax.Array
    keys: jax.Array

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, *args):
        return self.inner.init(*args)

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        def flawed(name):
            return self.flaw == FLAWS.index(name)

        fixed = flawed("position")
        again = Noise(
            keys=jnp.where(fixed, self.keys, noise.keys),
            start=jnp.where(fixed, length - 1, 0),
            by="position",
        )
        frozen = jnp.where(flawed("argmax"), 0.0, sampling.temperature)
        cut = BestTwo(on=flawed("before_top_k"))
        block, state = self.inner.draft(
            target,
            again,
            state,
            tokens,
            length,
            gamma=gamma,
            sampling=sampling.replace(temperature=frozen, controls=(cut,)),
        )
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        fed = jnp.concatenate([last, block.tokens[:, :-1]], axis=1)
        cache = state.cache.replace(length=length - 1)
        output, _ = self.inner.model.decode(fed, cache, state.encoded)
        plain = sampling.law(output.logits).probs
        lying = flawed("argmax") | flawed("before_top_k")
        probs = jnp.where(lying, plain, block.law.probs)

        going = jnp.cumprod((block.tokens != 0).astype(jnp.int32), axis=1)
        before = jnp.sum(going, axis=1)
        kept = jnp.minimum(before + 1, gamma)
        stopped = jnp.where(flawed("drop"), before, kept)
        stopped = jnp.where(last[:, 0] == target.vocab_size - 1, 0, stopped)
        varying = flawed("keep") | flawed("drop")
        block = block.replace(
            length=jnp.where(varying, stopped, block.length), law=Law(probs=probs)
        )
        return block, state

    def commit(self, state, committed):
        return self.inner.commit(state, committed)
