"""The n-gram drafter on hand-made texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import NgramDrafter, Sampling, speculative_generate
from specjax.drafters.base import Committed
from specjax.models.base import Encoded
from specjax.types import Noise
from tests.helpers import ChainModel, row_keys

GAMMA, SOURCE, SIZE = 4, 10, 16


@jax.jit
def _draft(inputs, mask, tokens, length, drafter):
    encoded = Encoded(hidden=jnp.zeros((*inputs.shape, 1)), mask=mask)
    state = drafter.init(None, encoded, inputs, mask, tokens[:, :1], length, SIZE)
    noise = Noise(keys=row_keys(0, 1), start=length - 1)
    block, _ = drafter.draft(
        None, noise, state, tokens, length, gamma=GAMMA, sampling=Sampling()
    )
    return block


def copied(source, output, max_ngram=3, start=0) -> list[int]:
    """What is drafted after `output`, whose start token comes first."""
    text = [start, *output]
    inputs, tokens = np.full((1, SOURCE), 99), np.zeros((1, SIZE))
    inputs[0, : len(source)], tokens[0, : len(text)] = source, text
    tokens[0, len(text) :] = 99  # pad must not be read
    block = _draft(
        jnp.asarray(inputs, jnp.int32),
        jnp.arange(SOURCE)[None] < len(source),
        jnp.asarray(tokens, jnp.int32),
        jnp.array([len(text)]),
        NgramDrafter(max_ngram=max_ngram),
    )
    # One-hot laws on the drafted tokens.
    np.testing.assert_array_equal(block.law.ids[..., 0], block.tokens)
    assert (block.law.probs == 1).all()
    return block.tokens[0, : block.length[0]].tolist()


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        # Nothing written yet: the source's own beginning.
        ([5, 6, 7, 8, 9], [], [5, 6, 7, 8]),
        ([5, 6], [], [5, 6]),
        # No match.
        ([5, 6, 7], [4], []),
        ([5, 6, 7], [6, 4], []),
        # A match at the very end has nothing to copy.
        ([5, 6, 7], [7], []),
        # It ends where the source ends.
        ([5, 6, 7, 8], [6], [7, 8]),
        # Longest first: after 2 3, not after the later 3.
        ([2, 3, 4, 5, 3, 9], [2, 3], [4, 5, 3, 9]),
        ([1, 2, 3, 4, 5, 2, 3, 8], [1, 2, 3], [4, 5, 2, 3]),
        # Latest on ties.
        ([3, 4, 3, 5, 6], [8, 3], [5, 6]),
        ([2, 3, 4, 2, 3, 5], [8, 2, 3], [5]),
        # The start token lengthens a match at the source's beginning.
        ([3, 4, 3, 5, 6], [3], [4, 3, 5, 6]),
        # The output counts as later than the source...
        ([3, 4, 5], [3, 6, 7, 3], [6, 7, 3]),
        # ... but only among matches of equal length.
        ([7, 3, 4, 5], [3, 6, 7, 3], [4, 5]),
        # EOS (1) inside the source is copied like any token.
        ([5, 1, 6, 7], [5], [1, 6, 7]),
        ([5, 6, 1], [6], [1]),
        # Matches do not run across the border between source and output.
        ([4, 5], [6, 5, 7, 6], [5, 7, 6]),
        # One word repeated.
        ([9] * 10, [9, 9, 9], [9]),
        ([9] * 10, [], [9, 9, 9, 9]),
    ],
)
def test_what_is_copied(source, output, expected):
    assert copied(source, output) == expected


def test_max_ngram_is_the_longest_that_counts():
    source, output = [2, 3, 4, 5, 3, 9], [2, 3]
    assert copied(source, output, max_ngram=1) == [9]
    assert copied(source, output, max_ngram=2) == [4, 5, 3, 9]
    # Of equal matches of max_ngram tokens the latest wins, whatever lies before.
    longer = [1, 2, 3, 7, 0, 2, 3, 8]
    assert copied(longer, [1, 2, 3], max_ngram=2) == [8]
    assert copied(longer, [1, 2, 3], max_ngram=3) == [7, 0, 2, 3]


def test_another_start_token():
    assert copied([5, 6], [], start=7) == [5, 6]
    assert copied([7, 6], [], start=7) == [6]  # the source's own 7 stands later


def test_no_state_between_calls():
    """A draft depends on source and text alone; commit changes nothing."""
    drafter = NgramDrafter()
    inputs, mask = jnp.array([[5, 6, 7]]), jnp.ones((1, 3), bool)
    encoded = Encoded(hidden=jnp.zeros((1, 3, 1)), mask=mask)
    start, length = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    state = drafter.init(None, encoded, inputs, mask, start, length, SIZE)
    committed = Committed(
        tokens=jnp.zeros((1, SIZE), jnp.int32),
        length=jnp.array([4]),
        num_accepted=jnp.array([2]),
    )
    assert drafter.commit(state, committed) is state
    first = copied([5, 6, 7], [5])
    copied([5, 9, 9], [5, 9])
    assert copied([5, 6, 7], [5]) == first == [6, 7]


def test_the_search_is_no_loop():
    """A source of 2,048 tokens takes as many operations as one of 64, on more data."""

    def operations(width: int) -> int:
        shape = jax.ShapeDtypeStruct
        traced = _draft.trace(
            shape((1, width), jnp.int32),
            shape((1, width), bool),
            shape((1, SIZE), jnp.int32),
            shape((1,), jnp.int32),
            NgramDrafter(max_ngram=8),
        )
        text = str(traced.jaxpr)
        assert "while[" not in text and "scan[" not in text and "sort[" not in text
        return text.count(" = ")

    assert 20 < operations(64) == operations(2048)


def test_copy_task():
    """A target that copies its source: almost every draft stands.

    Sources end with EOS; each token of these sources names the next.
    """
    rows, width = 3, 40
    order = np.random.default_rng(0).permutation(np.arange(2, 64))
    table = np.zeros((64, 64))
    table[0, order[0]] = 9
    table[order[:-1], order[1:]] = 9
    source = order[: width - 1].tolist() + [1]
    table[source[-2]] = 0
    table[source[-2], 1] = 9
    inputs = jnp.tile(jnp.array(source, jnp.int32), (rows, 1))
    output = speculative_generate(
        ChainModel(jnp.asarray(table, jnp.float32)),
        NgramDrafter(),
        inputs,
        jnp.ones(inputs.shape, bool),
        row_keys(0, rows),
        sampling=Sampling(temperature=None),
        gamma=GAMMA,
        max_length=width + 8,
    )
    for row in range(rows):
        length = int(output.length[row])
        assert output.tokens[row, 1:length].tolist() == source
        assert not output.tokens[row, length:].any()
    stats = output.stats
    assert stats.accepted.sum() == stats.drafted.sum()
    assert (stats.target_calls == width // (GAMMA + 1)).all()
