"""Cases of every control, and a slow reference of what each does."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import ModelDrafter
from specjax.controls import (
    BannedSequences,
    BannedTokens,
    CountPenalty,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
)
from specjax.types import Prefix

EOS = 2
# What each control is where it does nothing, so that all cases share one program.
IDLE: dict[str, Any] = dict(
    length=1,
    ids=(),
    sequences=(),
    penalty=1.0,
    frequency=0.0,
    presence=0.0,
    size=10**6,
    start=0,
)
CASES: dict[str, dict[str, Any]] = {
    "minimum length": {"length": 9},
    "banned tokens": {"ids": (4, 7)},
    "banned sequences": {"sequences": ((5, 6), (3, 4, 5), (8,), (6, 3))},
    "repetition penalty": {"penalty": 2.5},
    "rewarded repetition": {"penalty": 0.6, "start": 1},
    "frequency penalty": {"frequency": 1.3},
    "presence penalty": {"presence": 2.0, "start": 4},
    "no id twice": {"size": 1},
    "no bigram twice": {"size": 2},
    "no trigram of its own twice": {"size": 3, "start": 1},
    "all": {
        "length": 7,
        "ids": (4,),
        "sequences": ((5, 6),),
        "penalty": 1.2,
        "frequency": 0.3,
        "presence": 0.5,
        "size": 2,
    },
}
K, M = 4, 3  # most sequences, most ids in one


def settings(case: dict[str, Any]) -> dict[str, Any]:
    """Every number of one row, idle unless the case says so."""
    own = IDLE | case
    ids = [*own["ids"], *[-1] * (K - len(own["ids"]))]
    sequences = [[*own_ids, *[-1] * (M - len(own_ids))] for own_ids in own["sequences"]]
    sequences += [[-1] * M] * (K - len(sequences))
    return own | {"ids": ids, "sequences": sequences}


def by_row(cases: list[dict[str, Any]], eos_id: int = EOS) -> tuple[Any, ...]:
    """All controls at once, with the numbers of each row's own case."""
    rows = [settings(case) for case in cases]

    def each(name: str, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.asarray([row[name] for row in rows], dtype)

    return (
        RepetitionPenalty(each("penalty", jnp.float32), each("start")),
        CountPenalty(
            each("frequency", jnp.float32),
            each("presence", jnp.float32),
            each("start"),
        ),
        NoRepeatNgram(each("size"), each("start")),
        BannedTokens(each("ids")),
        BannedSequences(each("sequences")),
        MinLength(each("length"), eos_id),
    )


def without(logits: np.ndarray, banned: set[int]) -> np.ndarray:
    left = [-np.inf if i in banned else own for i, own in enumerate(logits)]
    return logits if max(left) == -np.inf else np.array(left)


def reference(
    logits: Any, text: list[int], case: dict[str, Any], eos_id: int = EOS
) -> np.ndarray:
    """All controls of a case written anew: loops over one text, in float64."""
    own, logits = IDLE | case, np.array(logits, np.float64)
    given = text[own["start"] :]
    for token in range(len(logits)):
        if token in given:
            worse = logits[token] < 0
            logits[token] *= own["penalty"] if worse else 1 / own["penalty"]
        logits[token] -= own["frequency"] * given.count(token)
        logits[token] -= own["presence"] * (token in given)
    n = own["size"]
    grams = [tuple(given[i : i + n]) for i in range(len(given) - n + 1)]
    last = tuple(text[len(text) - n + 1 :]) if n > 1 else ()
    logits = without(logits, {gram[-1] for gram in grams if gram[:-1] == last})
    logits = without(logits, set(own["ids"]))
    banned = {
        s[-1] for s in own["sequences"] if text[len(text) - len(s) + 1 :] == [*s[:-1]]
    }
    banned |= {s[0] for s in own["sequences"] if len(s) == 1}
    long = {s[-1] for s in own["sequences"] if len(s) - 1 > len(text)}
    logits = without(logits, banned - long)
    return without(logits, {eos_id} if len(text) + 1 < own["length"] else set())


@struct.dataclass
class Nothing:
    """A control that edits nothing, for a draft that is to have none."""

    def __call__(self, logits, tokens, length):
        return logits


@struct.dataclass
class Lying:
    """Draws without the controls, and reports the law with them."""

    inner: ModelDrafter

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, *arguments):
        return self.inner.init(*arguments)

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        free = sampling.replace(controls=())
        block, state = self.inner.draft(
            target, noise, state, tokens, length, gamma=gamma, sampling=free
        )
        places = length[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
        rows = jnp.arange(len(length))[:, None]
        tokens = tokens.at[rows, places].set(block.tokens)
        prefix = Prefix(tokens=tokens, length=places)
        law = sampling.law(jnp.log(block.law.probs), prefix)
        return block.replace(law=law), state

    def commit(self, state, committed):
        return self.inner.commit(state, committed)
