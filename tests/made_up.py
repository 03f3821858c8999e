"""Batches that hypothesis makes up, for the decoder and for its slow reference.

Their shapes are fixed, so that one program serves all, and so are hypothesis's random
numbers: every run tries the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from hypothesis.extra.numpy import arrays

from specjax.decode_state import DecodeOutput
from tests.reference_decoder import Written

ROWS, SOURCE, PREFIX, GAMMA, LENGTH = 4, 5, 3, 3, 12
VOCAB, HASHES = 8, 61
CALLS = LENGTH  # each call of an unfinished row writes a token
FIXED = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
)
MANY = hypothesis.settings(FIXED, max_examples=600)


def per_row(low: int, high: int, columns: int | None = None) -> st.SearchStrategy:
    shape = (ROWS,) if columns is None else (ROWS, columns)
    # Without a fill, which would make most entries of a large array one number.
    own = st.integers(low, high)
    return arrays(np.int32, shape, elements=own, fill=st.nothing())


@dataclasses.dataclass(frozen=True)
class Batch:
    """What both decoders are given.

    Attributes:
        seed: of models, sources, prefixes and keys.
        source_length: real tokens of each source.
        prefix_length: of each prefix.
        budget: of each row.
        drafted: by row and call, tokens that are drafted.
        ends: a place, counted over all rows, whose token is EOS and one where a stop
            sequence of some tokens ends. Past the last row: none.
    """

    seed: int
    source_length: np.ndarray
    prefix_length: np.ndarray
    budget: np.ndarray
    drafted: np.ndarray
    ends: tuple[int, int, int]

    @property
    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @property
    def inputs(self) -> np.ndarray:
        return self.generator.integers(0, VOCAB, (ROWS, SOURCE)).astype(np.int32)

    @property
    def mask(self) -> np.ndarray:
        return np.arange(SOURCE)[None] < self.source_length[:, None]

    @property
    def prefix(self) -> np.ndarray:
        prefix = self.generator.integers(0, VOCAB, (ROWS, PREFIX)).astype(np.int32)
        prefix[:, 0] = 0
        return prefix

    def source(self, row: int) -> list[int]:
        return self.inputs[row, : self.source_length[row]].tolist()

    def start(self, row: int) -> list[int]:
        return self.prefix[row, : self.prefix_length[row]].tolist()

    def room(self, row: int) -> int:
        return min(int(self.budget[row]), LENGTH - int(self.prefix_length[row]))

    def endings(self, texts: list[list[int]]) -> tuple[int, list[list[int]]]:
        """EOS and stop sequences that lie in texts which rows would else write."""
        eos_place, stop_place, size = self.ends
        eos_id, stop = -1, []
        if eos_place < ROWS * LENGTH:
            row, place = divmod(eos_place, LENGTH)
            eos_id = texts[row][min(len(self.start(row)) + place, LENGTH - 1)]
        if stop_place < ROWS * LENGTH:
            row, place = divmod(stop_place, LENGTH)
            place = min(len(self.start(row)) + place, LENGTH - size)
            stop = [texts[row][place : place + size]]
        return eos_id, stop

    def arguments(self, eos_id: int, stop: list[list[int]]) -> dict[str, Any]:
        padded = np.full((1, 3), -1, np.int32)
        for own in stop:
            padded[0, : len(own)] = own
        return dict(
            max_length=LENGTH,
            budget=jnp.asarray(self.budget),
            prefix=jnp.asarray(self.prefix),
            prefix_length=jnp.asarray(self.prefix_length),
            eos_id=eos_id,
            stop=jnp.asarray(padded),
        )


PLACES = st.integers(0, 2 * ROWS * LENGTH)
BATCHES = st.builds(
    Batch,
    seed=st.integers(0, 2**32 - 1),
    source_length=per_row(1, SOURCE),
    prefix_length=per_row(1, PREFIX),
    budget=per_row(0, LENGTH + 2),
    drafted=per_row(0, GAMMA, CALLS),
    ends=st.tuples(PLACES, PLACES, st.integers(1, 3)),
)


def differences(output: DecodeOutput, wanted: list[Written]) -> list[str]:
    """What the two do not have alike."""
    tokens = np.zeros((ROWS, LENGTH), int)
    for row, own in enumerate(wanted):
        tokens[row, : len(own.text)] = own.text
    stats = output.stats
    given = np.asarray(output.length) - np.asarray(stats.emitted)
    pairs = {
        "tokens": (output.tokens, tokens),
        "length": (output.length, [len(own.text) for own in wanted]),
        "target_calls": (stats.target_calls, [own.target_calls for own in wanted]),
        "drafted": (stats.drafted, [own.drafted for own in wanted]),
        "accepted": (stats.accepted, [own.accepted for own in wanted]),
        "padding": (given[given < 1], []),
    }
    return [name for name, own in pairs.items() if not np.array_equal(*own)]


def rejects(
    batches: st.SearchStrategy, fails: Callable[[Any], Any], examples: int = 100
) -> bool:
    """Whether some batch shows the fault."""
    settings = hypothesis.settings(
        FIXED, max_examples=examples, phases=[hypothesis.Phase.generate]
    )
    try:
        hypothesis.find(batches, fails, settings=settings)
    except NoSuchExample:
        return False
    return True
