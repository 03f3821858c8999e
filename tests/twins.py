"""Deliberately wrong rules and drafters, each a fault that real code has had.

Tests of exactness must accept the right ones and reject these. Which one is used is a
traced number, so that all of them share one compiled program.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.model import ModelDrafter
from specjax.sampling import draw, residual
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, VerifyOutput, block_rule, token_rule


def _parts(noise: Noise, block: DraftBlock, scored: Scored):
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    nodes = jnp.arange(1, gamma + 1)
    uniforms = jax.vmap(lambda node: jax.random.uniform(noise.key(node, node)))(nodes)
    p = scored.law.dense(vocab_size)
    q = jnp.concatenate([block.law.dense(vocab_size), jnp.zeros((1, vocab_size))])
    return gamma, uniforms, p, q


def _first_failure(accepted: jax.Array, block: DraftBlock) -> jax.Array:
    real = jnp.arange(block.tokens.shape[0]) < block.length
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32)))


def _follow(noise, block, p, q, num_accepted, weights=None) -> VerifyOutput:
    """Draws the next token from `weights`, or as the token rule does."""
    if weights is None:
        row = jnp.where(num_accepted < block.length, q[num_accepted], 0.0)
        weights = residual(p[num_accepted], row)
    key = noise.key(0, num_accepted + 1)
    return VerifyOutput(num_accepted=num_accepted, next_token=draw(key, weights))


def _ratios(block: DraftBlock, p: jax.Array, q: jax.Array):
    gamma = block.tokens.shape[0]
    places = jnp.arange(gamma)
    return p[places, block.tokens], q[places, block.tokens]


def accept_equal(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Accepts where a draw of the target's own equals the draft, else the residual."""
    gamma, _, p, q = _parts(noise, block, scored)
    keys = jax.vmap(lambda node: noise.key(node, node))(jnp.arange(1, gamma + 1))
    own = jax.vmap(draw)(keys, p[:gamma])
    return _follow(noise, block, p, q, _first_failure(own == block.tokens, block))


def target_as_residual(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Draws from p after a rejection."""
    _, uniforms, p, q = _parts(noise, block, scored)
    p_x, q_x = _ratios(block, p, q)
    num_accepted = _first_failure(uniforms * q_x < p_x, block)
    return _follow(noise, block, p, q, num_accepted, weights=p[num_accepted])


def one_uniform(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Judges the whole block by one uniform number."""
    _, uniforms, p, q = _parts(noise, block, scored)
    p_x, q_x = _ratios(block, p, q)
    num_accepted = _first_failure(uniforms[0] * q_x < p_x, block)
    return _follow(noise, block, p, q, num_accepted)


def shifted_residual(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Takes the residual's draft row one place late."""
    _, uniforms, p, q = _parts(noise, block, scored)
    p_x, q_x = _ratios(block, p, q)
    num_accepted = _first_failure(uniforms * q_x < p_x, block)
    row = jnp.where(num_accepted < block.length, q[num_accepted + 1], 0.0)
    weights = residual(p[num_accepted], row)
    return _follow(noise, block, p, q, num_accepted, weights=weights)


def epsilon_ratio(noise: Noise, block: DraftBlock, scored: Scored, params: None):
    """Accepts with ``u <= p / (q + epsilon)``: at u = 0, whatever p is."""
    _, uniforms, p, q = _parts(noise, block, scored)
    p_x, q_x = _ratios(block, p, q)
    num_accepted = _first_failure(uniforms <= p_x / (q_x + 1e-9), block)
    return _follow(noise, block, p, q, num_accepted)


def written_out_block(
    noise: Noise,
    block: DraftBlock,
    scored: Scored,
    params: None,
    raw_last: bool = False,
    shared: bool = False,
) -> VerifyOutput:
    """Block verification written out place by place; with a flag, wrongly.

    Args:
        raw_last: the whole block passes with the uncapped ratio of joint probabilities.
        shared: one uniform number for all places.
    """
    gamma, uniforms, p, q = _parts(noise, block, scored)
    if shared:
        uniforms = jnp.broadcast_to(uniforms[:1], uniforms.shape)
    p_x, q_x = _ratios(block, p, q)
    joint, raw = jnp.float32(1.0), jnp.float32(1.0)
    num_accepted, scale = jnp.int32(0), jnp.float32(1.0)
    for i in range(gamma):
        ratio = p_x[i] / jnp.where(q_x[i] > 0, q_x[i], 1.0)
        joint, raw = jnp.minimum(joint * ratio, 1.0), raw * ratio
        mass = jnp.sum(jnp.maximum(joint * p[i + 1] - q[i + 1], 0.0))
        room = mass + 1.0 - joint
        passing = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
        last = raw if raw_last else joint
        passing = jnp.where(i + 1 == block.length, last, passing)
        passed = (uniforms[i] < passing) & (i < block.length)
        num_accepted = jnp.where(passed, i + 1, num_accepted)
        scale = jnp.where(passed, joint, scale)
    row = jnp.where(num_accepted < block.length, q[num_accepted], 0.0)
    scale = jnp.where(num_accepted < block.length, scale, 1.0)
    weights = residual(scale * p[num_accepted], row)
    return _follow(noise, block, p, q, num_accepted, weights=weights)


def raw_last_block(noise, block, scored, params):
    return written_out_block(noise, block, scored, params, raw_last=True)


def one_uniform_block(noise, block, scored, params):
    return written_out_block(noise, block, scored, params, shared=True)


RULES = (
    token_rule,
    block_rule,
    accept_equal,
    target_as_residual,
    one_uniform,
    shifted_residual,
    raw_last_block,
    one_uniform_block,
)


def chosen_rule(noise, block, scored, which) -> VerifyOutput:
    """Rule number `which` of `RULES`."""
    branches = [lambda n, b, s, rule=rule: rule(n, b, s, None) for rule in RULES]
    return jax.lax.switch(which, branches, noise, block, scored)


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
