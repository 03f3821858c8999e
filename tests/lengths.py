"""Rules of the draft's length for tests: all at once, each in rows of its own."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.acceptance_head import AcceptanceHead
from specjax.drafters.lengths import (
    AcceptanceStop,
    Bandit,
    BanditState,
    Confidence,
    EntropyBound,
    Fixed,
    Heuristic,
)
from specjax.drafters.model import ModelDrafter
from specjax.drafters.optimal_length import Optimal

# Those that look at which token was drawn: they must keep the last one.
LOOKING = ("confidence", "bandit", "optimal")


def head(width: int, seed: int = 0, scale: float = 1.0) -> AcceptanceHead:
    """One that says different things of different hidden states."""
    keys = jax.random.split(jax.random.key(seed))
    settings = {"features": width, "hidden": 4, "draft": ""}
    made = AcceptanceHead.create(None, settings, keys[0])
    return made.replace(outer=scale * jax.random.normal(keys[1], (4,)))


def rules(width: int) -> dict[str, Any]:
    """One of each, set so that drafts of three to six tokens differ in length.

    Args:
        width: of the draft's hidden states.
    """
    return {
        "fixed": Fixed(2),
        "heuristic": Heuristic(start=1, up=1),
        "confidence": Confidence(0.45),
        "entropy": EntropyBound(kappa=0.3, start=0.45, step=0.05),
        "acceptance": AcceptanceStop(head(width), threshold=0.6),
        "bandit": Bandit((Confidence(0.45), Confidence(0.7))),
        "optimal": Optimal(cost=0.2),
    }


@struct.dataclass
class Each:
    """A rule for every row: number ``which[b]`` of several."""

    rules: tuple[Any, ...]
    which: jax.Array

    reads_hidden: ClassVar[bool] = True

    def init(self, batch):
        return Bandit(self.rules).init(batch).replace(arm=self.which)

    def begin(self, state: BanditState, gamma):
        begun = [
            rule.begin(own, gamma)
            for rule, own in zip(self.rules, state.rules, strict=True)
        ]
        same = Bandit(self.rules)
        state = same._kept(state, [own for _, own in begun])
        return same._chosen(state, [own for own, _ in begun]), state

    def go_on(self, state: BanditState, signal):
        return Bandit(self.rules).go_on(state, signal)

    def commit(self, state: BanditState, drafted, num_accepted):
        told = [
            rule.commit(own, drafted, num_accepted)
            for rule, own in zip(self.rules, state.rules, strict=True)
        ]
        return Bandit(self.rules)._kept(state, told)


@struct.dataclass
class Seeing:
    """A table or hash model whose hidden states are its own laws."""

    model: Any

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def encode(self, inputs, mask, *, dropout_key=None):
        return self.model.encode(inputs, mask)

    def init_cache(self, batch_size, size):
        return self.model.init_cache(batch_size, size)

    def decode(self, tokens, cache, encoded, *, taps=(), **options):
        output, cache = self.model.decode(tokens, cache, encoded, **options)
        hidden = jax.nn.softmax(output.logits)
        return output.replace(features=(hidden,) * len(taps)), cache


@struct.dataclass
class Dropping:
    """A model drafter with a rule, which may throw away what a draft ended with.

    Attributes:
        inner: has the rule.
        drops: whether it does; where gamma ended a draft there is nothing to drop.
    """

    inner: ModelDrafter
    drops: jax.Array

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, *arguments):
        return self.inner.init(*arguments)

    def draft(self, *arguments, gamma, **options):
        block, state = self.inner.draft(*arguments, gamma=gamma, **options)
        drops = self.drops & (block.length < gamma)
        length = block.length - drops.astype(jnp.int32)
        return block.replace(length=length), state

    def commit(self, state, committed):
        return self.inner.commit(state, committed)
