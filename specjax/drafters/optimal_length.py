"""The draft's length by its worth: one token more where it pays for its time."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.chain import Signal
from specjax.drafters.lengths import ABOVE, SHARE, SIZE, Bounds, Number

# Upper ends of the classes of confidence whose acceptance is told apart.
_EDGES = (0.3, 0.6, 0.8, 0.95)
_CLASSES = len(_EDGES) + 1
_LEARNT = 32  # tokens of a block that are learnt from, from its first


@struct.dataclass
class OptimalState:
    """Running counts of each row, C classes of confidence, and of its block.

    Attributes:
        tried: ``float32[B, C]`` tokens that were judged.
        stood: ``float32[B, C]`` those of them that were accepted.
        tokens: ``float32[B]`` written so far.
        time: ``float32[B]`` what that took, in target steps.
        rate: ``float32[B]`` tokens per target step that a block is worth.
        standing: ``float32[B]`` the chance that the block stands so far.
        classes: ``int32[B, 32]`` of the block's tokens.
    """

    tried: Float[Array, "B C"]
    stood: Float[Array, "B C"]
    tokens: Float[Array, " B"]
    time: Float[Array, " B"]
    rate: Float[Array, " B"]
    standing: Float[Array, " B"]
    classes: Int[Array, "B M"]


@struct.dataclass
class Optimal:
    """One token more while its chance to stand is worth the time that it takes.

    A block of s_1 + ... + s_g + 1 expected tokens takes g (c + dv) + v target steps;
    one more token lifts the ratio of what is written to what it takes, lambda, where
    ``s_(g+1) >= lambda (c + dv)`` (optimal stopping; Dinkelbach's fixed point). Both
    sides are estimated from the row itself: s as the product of the drafted tokens'
    acceptance, which is counted by class of the draft's confidence and expected to
    equal it, times the mean acceptance of the token to come; lambda as what was written
    per target step so far.

    Acceptance is taken to depend on confidence, not on depth: so depths that were never
    reached are known from others. And since the token that ended a draft is judged too,
    no class of confidence is left without new counts.

    Attributes:
        cost: c, drafting one token / one target step.
        growth: dv, what one token more adds to verification; 0: its width is fixed.
        verify: v, verifying a block / one target step.
        prior: mean acceptance that is expected before any was seen.
        weight: tokens of each class, and blocks, that an expectation counts as.
    """

    cost: Number
    growth: Number = 0.0
    verify: Number = 1.0
    prior: Number = 0.7
    weight: Number = 4.0

    reads_hidden: ClassVar[bool] = False
    bounds: ClassVar[dict[str, Bounds]] = {
        "cost": SIZE,
        "growth": SIZE,
        "verify": ABOVE,
        "prior": SHARE,
        "weight": ABOVE,
    }

    def init(self, batch: int) -> OptimalState:
        """Nothing was seen."""
        return OptimalState(
            tried=jnp.zeros((batch, _CLASSES), jnp.float32),
            stood=jnp.zeros((batch, _CLASSES), jnp.float32),
            tokens=jnp.zeros(batch, jnp.float32),
            time=jnp.zeros(batch, jnp.float32),
            rate=jnp.ones(batch, jnp.float32),
            standing=jnp.ones(batch, jnp.float32),
            classes=jnp.zeros((batch, _LEARNT), jnp.int32),
        )

    def begin(self, state: OptimalState, gamma: int) -> tuple[Array, OptimalState]:
        """Up to gamma, at the rate of the past."""
        length = jnp.arange(1, gamma + 1, dtype=jnp.float32)
        prior = jnp.asarray(self.prior, jnp.float32)
        tokens = 1 + jnp.cumsum(jnp.cumprod(jnp.broadcast_to(prior, length.shape)))
        time = self.verify + length * (self.cost + self.growth)
        best = jnp.argmax(tokens / time)
        rate = (state.tokens + self.weight * tokens[best]) / (
            state.time + self.weight * time[best]
        )
        state = state.replace(rate=rate, standing=jnp.ones_like(state.standing))
        return jnp.array(gamma, jnp.int32), state

    def go_on(
        self, state: OptimalState, signal: Signal
    ) -> tuple[Bool[Array, " B"], OptimalState]:
        """While one token more is worth its time."""
        confidence = signal.confidence
        own = jnp.searchsorted(jnp.array(_EDGES), confidence).astype(jnp.int32)
        mean = (jnp.sum(state.stood, axis=1) + self.weight * self.prior) / (
            jnp.sum(state.tried, axis=1) + self.weight
        )
        stood, tried = (
            jnp.take_along_axis(counts, own[:, None], axis=1)[:, 0]
            for counts in (state.stood, state.tried)
        )
        accepted = (stood + self.weight * confidence) / (tried + self.weight)
        standing = state.standing * accepted
        classes = state.classes.at[:, signal.depth - 1].set(own, mode="drop")
        worth = standing * mean >= state.rate * (self.cost + self.growth)
        return worth, state.replace(standing=standing, classes=classes)

    def commit(
        self, state: OptimalState, drafted: Array, num_accepted: Array
    ) -> OptimalState:
        """Counts what was judged: all that stood, and the first token that did not."""
        place = jnp.arange(_LEARNT)[None]
        stood = place < num_accepted[:, None]
        tried = (place <= num_accepted[:, None]) & (place < drafted[:, None])
        classes = jax.nn.one_hot(state.classes, _CLASSES, dtype=bool)

        def count(those: Array) -> Array:
            return jnp.sum(classes & those[..., None], axis=1, dtype=jnp.float32)

        time = self.verify + drafted.astype(jnp.float32) * (self.cost + self.growth)
        return state.replace(
            tried=state.tried + count(tried),
            stood=state.stood + count(stood),
            tokens=state.tokens + num_accepted.astype(jnp.float32) + 1,
            time=state.time + time,
        )
