"""Whatever the batch: greedy decoding writes and counts what the slow reference does.

Drafts are scripted, so that any number of them is right at any step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import strategies as st

from specjax import (
    Sampling,
    autoregressive_generate,
    decoding,
    speculative_generate,
)
from tests import reference_decoder
from tests.helpers import (
    HashModel,
    ScriptDrafter,
    quick_compile,  # noqa: F401
    row_keys,
)
from tests.made_up import (
    BATCHES,
    CALLS,
    FIXED,
    GAMMA,
    HASHES,
    LENGTH,
    MANY,
    ROWS,
    VOCAB,
    Batch,
    differences,
    per_row,
    rejects,
)
from tests.reference_decoder import Written, hash_law


@dataclasses.dataclass(frozen=True)
class Scripted(Batch):
    """As `Batch`.

    Attributes:
        right: by row and call, so many drafts are right.
        ties: logits of few values.
    """

    right: np.ndarray
    ties: bool


SCRIPTED = st.builds(
    lambda batch, right, ties: Scripted(**vars(batch), right=right, ties=ties),
    BATCHES,
    per_row(0, GAMMA, CALLS),
    st.booleans(),
)


def greedy(batch: Scripted, drafter_of=ScriptDrafter):
    """The decoder's outputs, with and without drafts, and the reference's."""
    table = 2 * batch.generator.normal(size=(HASHES, VOCAB))
    table = (np.round(table) if batch.ties else table).astype(np.float32)
    laws = [hash_law(table, batch.source(r), temperature=None) for r in range(ROWS)]
    length = LENGTH + GAMMA + 1  # the last block runs past the end
    truth = [
        reference_decoder.plain(batch.start(r), laws[r], length - len(batch.start(r)))
        for r in range(ROWS)
    ]
    eos_id, stop = batch.endings(truth)

    def by_row(row: int, **changes: Any) -> Written:
        def scripted(text: list[int], call: int, depth: int) -> np.ndarray:
            wrong = depth >= batch.right[row, call]
            token = (truth[row][len(text)] + wrong) % VOCAB
            return np.eye(VOCAB)[token]

        options = dict(
            target=laws[row],
            draft=scripted,
            draft_length=lambda call: batch.drafted[row, call],
            coin=lambda call, depth: 0.5,
            pick=lambda call, depth, law: int(np.argmax(law)),
            room=batch.room(row),
            gamma=GAMMA,
            eos_id=eos_id,
            stop=stop,
        )
        return reference_decoder.decode(batch.start(row), **{**options, **changes})

    common = (
        jnp.asarray(batch.inputs),
        jnp.asarray(batch.mask),
        row_keys(0, ROWS),
    )
    options = dict(sampling=Sampling(temperature=None), **batch.arguments(eos_id, stop))
    target = HashModel(jnp.asarray(table))
    drafter = drafter_of(
        truth=jnp.asarray(truth, jnp.int32),
        right=jnp.asarray(batch.right),
        length=jnp.asarray(batch.drafted),
    )
    fast = speculative_generate(target, drafter, *common, gamma=GAMMA, **options)
    slow = autoregressive_generate(target, *common, **options)
    return (
        (fast, [by_row(row) for row in range(ROWS)]),
        (
            slow,
            [by_row(r, draft_length=lambda call: 0, gamma=0) for r in range(ROWS)],
        ),
    )


def greedy_is_the_reference(batch: Scripted) -> None:
    for output, wanted in greedy(batch):
        assert differences(output, wanted) == []


test_greedy_decoding_is_that_of_the_reference = FIXED(
    hypothesis.given(SCRIPTED)(greedy_is_the_reference)
)
test_greedy_decoding_of_many_batches = pytest.mark.slow(
    MANY(hypothesis.given(SCRIPTED)(greedy_is_the_reference))
)


FAULTS = (
    "none",
    "EOS inside a block is overlooked",
    "stop sequences are overlooked",
    "one token past the budget",
    "a rejected draft stays",
    "no cache is rolled back",
    "the cache of every row as that of row 0",
    "finished rows count calls",
    "accepted drafts are counted after the cut",
)


@struct.dataclass
class FaultyState:
    call: jax.Array
    fault: jax.Array


@struct.dataclass
class FaultyDrafter(ScriptDrafter):
    """As scripted; it carries the number of the fault to where a step can read it."""

    fault: jax.Array = None

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        return FaultyState(jnp.zeros(inputs.shape[0], jnp.int32), self.fault)


def faulty(state, block, verdict, logits, num_tokens, eos_id, stop, right):
    """`commit.commit` with one of `FAULTS`."""
    if state.draft_state is None:
        return right(state, block, verdict, logits, num_tokens, eos_id, stop)

    def has(name: str) -> jax.Array:
        return state.draft_state.fault == FAULTS.index(name)

    depth, stands = jnp.arange(GAMMA)[None], verdict.num_accepted[:, None]
    inside = jnp.any((block.tokens == eos_id) & (depth < stands), 1, keepdims=True)
    eos_id = jnp.where(has(FAULTS[1]) & inside, -1, eos_id)
    stop = jnp.where(has(FAULTS[2]), -1, stop)
    at = jnp.minimum(stands, GAMMA - 1)
    rejected = jnp.take_along_axis(block.tokens, at, axis=1)[:, 0]
    stays = has(FAULTS[4]) & (verdict.num_accepted < block.length)
    chosen = jnp.where(stays, rejected, verdict.next_token)
    after = right(
        state.replace(limit=state.limit + has(FAULTS[3]).astype(jnp.int32)),
        block,
        verdict.replace(next_token=chosen),
        logits,
        num_tokens,
        eos_id,
        stop,
    )
    slots = jnp.where(has(FAULTS[5]), state.cache.length, after.cache.length)
    slots = jnp.where(has(FAULTS[6]), jnp.zeros_like(slots) + slots[0], slots)
    stats, count = after.stats, after.stats.emitted - state.stats.emitted
    calls = stats.target_calls + (has(FAULTS[7]) & state.done).astype(jnp.int32)
    cut = has(FAULTS[8]) & (depth >= count[:, None])
    accepted = jnp.where(cut, state.stats.accepted, stats.accepted)
    return after.replace(
        limit=state.limit,
        cache=after.cache.replace(length=slots),
        stats=stats.replace(target_calls=calls, accepted=accepted),
    )


def test_a_faulty_decoder_is_found_out(monkeypatch):
    right = decoding.commit
    monkeypatch.setattr(
        decoding, "commit", lambda *arguments: faulty(*arguments, right)
    )

    def found(fault: int) -> bool:
        def drafter(**script):
            return FaultyDrafter(fault=jnp.int32(fault), **script)

        def fails(batch: Scripted) -> bool:
            return differences(*greedy(batch, drafter_of=drafter)[0]) != []

        return rejects(SCRIPTED, fails)

    assert [found(fault) for fault in range(len(FAULTS))] == [False] + [True] * 8
