"""Counters traced by hand: calls that accept 3, 0 and 2 drafts of 3."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import metrics, theory
from specjax.decoding import Stats, autoregressive_generate, speculative_generate
from specjax.errors import InputError
from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law
from tests.helpers import row_keys

VOCABULARY = 16
GREEDY = Sampling(temperature=None)


@struct.dataclass
class Counter:
    """Says 2 at position 1, 3 at position 2, and so on, whatever came before."""

    vocab_size: ClassVar[int] = VOCABULARY

    def encode(self, inputs, mask, *, dropout_key=None):
        return Encoded(hidden=jnp.zeros(inputs.shape + (1,)), mask=mask, cross=())

    def init_cache(self, batch_size, size):
        return Cache(memory=(), length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self, tokens, cache, encoded, *, parents=None, taps=(), dropout_key=None
    ):
        assert parents is None, "it decodes chains"
        fed = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        said = (cache.length[:, None] + fed[None] + 2) % VOCABULARY
        logits = jax.nn.one_hot(said, VOCABULARY)
        return DecoderOutput(logits=logits), cache.replace(
            length=cache.length + len(fed)
        )


@struct.dataclass
class Scripted:
    """Drafts what `Counter` says, but for `wrong` positions; `short` blocks are cut.

    Attributes:
        wrong: ``bool[B, L]`` positions at which row b's draft is wrong.
        short: ``int32[B, L]`` longest draft that begins at a position.
    """

    wrong: jax.Array
    short: jax.Array

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        return ()

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        rows = jnp.arange(tokens.shape[0])[:, None]
        place = length[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
        wrong = self.wrong[rows, place].astype(jnp.int32)
        tokens = (place + 1 + wrong) % VOCABULARY
        law = Law(probs=jnp.ones(place.shape + (1,)), ids=tokens[..., None])
        real = jnp.minimum(self.short[rows[:, 0], length], gamma)
        return DraftBlock(tokens=tokens, length=real, law=law), state

    def commit(self, state, committed):
        return state


def decode(wrong, short=None, budget=8, gamma=3) -> Stats:
    """One row per list of wrong positions; `short` maps a position to a length."""
    rows, size = len(wrong), 13
    mistakes = np.zeros((rows, size + gamma), bool)
    for row, positions in enumerate(wrong):
        mistakes[row, positions] = True
    limits = np.full(mistakes.shape, gamma, np.int32)
    for position, length in (short or {}).items():
        limits[:, position] = length
    output = speculative_generate(
        Counter(),
        Scripted(wrong=jnp.asarray(mistakes), short=jnp.asarray(limits)),
        jnp.ones((rows, 2), jnp.int32),
        jnp.ones((rows, 2), bool),
        row_keys(0, rows),
        sampling=GREEDY,
        gamma=gamma,
        max_length=size,
        budget=budget,
    )
    expected = np.arange(2, 2 + int(output.stats.emitted[0]))
    assert np.array_equal(output.tokens[0, 1 : 1 + len(expected)], expected)
    return output.stats


def test_calls_that_accept_3_0_2():
    # Drafted 1 2 3, all stand, 4 is the bonus; 5 fails; 6 7 stand and 8 fails.
    stats = decode([[5, 8]])
    assert stats.target_calls.tolist() == [3]
    assert stats.drafted.tolist() == [[3, 3, 3]]
    assert stats.accepted.tolist() == [[2, 2, 1]]
    assert metrics.acceptance_rate(stats) == 5 / 9
    assert metrics.survival(stats) == [2 / 3, 2 / 3, 1 / 3]
    assert metrics.accepted_counts(stats) == [1, 0, 1, 1]
    assert metrics.draft_length(stats) == 3.0
    assert metrics.block_efficiency(stats) == 8 / 3
    # Nothing was cut off, so tokens per call and survival say the same.
    assert 1 + sum(metrics.survival(stats)) == pytest.approx(8 / 3)


def test_a_depth_that_was_not_drafted_did_not_survive():
    # The third call drafts 6 7 alone; both stand, 8 is the bonus.
    stats = decode([[5]], short={6: 2})
    assert stats.drafted.tolist() == [[3, 3, 2]]
    assert stats.accepted.tolist() == [[2, 2, 1]]
    assert metrics.acceptance_rate(stats) == 5 / 8
    assert metrics.draft_length(stats) == 8 / 3
    # Over calls, not over drafts of that depth, which would give 1/2 at depth 3 ...
    assert metrics.survival(stats) == [2 / 3, 2 / 3, 1 / 3]
    # ... and the speedup would no longer be tokens over cost.
    free = theory.speedup_from_survival(metrics.survival(stats), 0.0)
    assert free == pytest.approx(metrics.block_efficiency(stats))


def test_the_cut_at_the_budget_shows_in_emitted_alone():
    stats = decode([[5, 8]], budget=6)
    assert stats.emitted.tolist() == [6]
    assert metrics.block_efficiency(stats) == 2.0
    assert metrics.survival(stats) == [2 / 3, 2 / 3, 1 / 3]


def test_calls_count_alike_whatever_row_they_belong_to():
    stats = decode([[5, 8], list(range(1, 9))])
    assert stats.target_calls.tolist() == [3, 8]
    assert metrics.survival(stats) == [2 / 11, 2 / 11, 1 / 11]
    assert metrics.block_efficiency(stats) == 16 / 11


def test_padding_rows_count_nothing():
    alone = decode([[5, 8]])
    padded = decode([[5, 8], [2]], budget=jnp.array([8, 0]))
    assert metrics.survival(padded) == metrics.survival(alone)
    assert metrics.block_efficiency(padded) == metrics.block_efficiency(alone)


def test_merge_weighs_calls_not_batches():
    first, second = decode([[5, 8]]), decode([list(range(1, 9)), [5, 8]])
    together = metrics.merge([first, second])
    assert together.target_calls.tolist() == [3, 8, 3]
    assert metrics.block_efficiency(together) == 24 / 14
    mean = (metrics.block_efficiency(first) + metrics.block_efficiency(second)) / 2
    assert metrics.block_efficiency(together) != pytest.approx(mean)


def test_merge_refuses_different_gammas():
    with pytest.raises(InputError, match=r"\[2, 3\]"):
        metrics.merge([decode([[5]]), decode([[5]], gamma=2)])
    with pytest.raises(InputError):
        metrics.merge([])


def test_nothing_drafted_and_nothing_decoded_are_not_zero():
    plain = autoregressive_generate(
        Counter(),
        jnp.ones((1, 2), jnp.int32),
        jnp.ones((1, 2), bool),
        row_keys(0, 1),
        sampling=GREEDY,
        max_length=9,
    ).stats
    assert metrics.block_efficiency(plain) == 1.0
    assert metrics.survival(plain) == []
    assert metrics.accepted_counts(plain) == [8]
    assert math.isnan(metrics.acceptance_rate(plain))
    nothing = decode([[5]], budget=0)
    assert math.isnan(metrics.block_efficiency(nothing))
    assert all(math.isnan(depth) for depth in metrics.survival(nothing))
    never = decode([[]], short={position: 0 for position in range(13)})
    assert metrics.survival(never) == [0.0, 0.0, 0.0]
    assert math.isnan(metrics.acceptance_rate(never))
