"""Who writes the texts of a step, and what is written."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import errors
from specjax.decoding import autoregressive_generate
from specjax.proof import tables
from specjax.sampling import Sampling
from specjax.training import step, texts
from tests import helpers

KEY = jax.random.key(7)
MIXED = texts.Mixture(truth=0.5, target=0.3, draft=0.2)


def batch_of(rows: int, width: int, filled: int | None = None) -> step.Batch:
    """Sources of one token; the last rows only fill the batch."""
    inputs = jnp.full((rows, 2), 2, jnp.int32)
    real = jnp.arange(rows) < (rows if filled is None else filled)
    return step.Batch(
        inputs=inputs,
        inputs_mask=jnp.ones((rows, 2), bool),
        targets=jnp.full((rows, width), 3, jnp.int32),
        targets_mask=jnp.broadcast_to(real[:, None], (rows, width)),
    )


def test_each_writer_has_its_share_of_the_steps():
    counts = collections.Counter(
        texts.choose_writer(MIXED, KEY, number) for number in range(400)
    )
    shares = [MIXED.truth, MIXED.target, MIXED.draft]
    observed = [counts[writer] for writer in texts.WRITERS]
    assert stats.chisquare(observed, 400 * np.array(shares)).pvalue > 1e-3
    again = [texts.choose_writer(MIXED, KEY, number) for number in range(20)]
    assert again == [texts.choose_writer(MIXED, KEY, number) for number in range(20)]
    assert len(set(again)) > 1


@pytest.mark.parametrize("writer", texts.WRITERS)
def test_a_sole_writer_writes_all(writer):
    sole = texts.Mixture(**{"truth": 0.0} | {writer: 1.0})
    assert {texts.choose_writer(sole, KEY, number) for number in range(9)} == {writer}


def test_greedy_texts_are_the_models_greedy_outputs():
    model = helpers.tiny_t5(0)
    batch = batch_of(4, 9, filled=3)
    batch = batch.replace(inputs=jax.random.randint(KEY, (4, 2), 2, model.vocab_size))
    got = texts.rewrite(model, batch, KEY, 5, temperature=None)
    plain = autoregressive_generate(
        model,
        batch.inputs,
        batch.inputs_mask,
        jax.random.split(KEY, 4),
        sampling=Sampling(temperature=None),
        max_length=10,
    )
    for row in range(3):
        written = np.asarray(plain.tokens)[row, 1 : int(plain.length[row])]
        np.testing.assert_array_equal(got.targets[row, : len(written)], written)
        assert got.targets_mask[row].sum() == len(written) > 0
    assert not got.targets_mask[3].any()
    np.testing.assert_array_equal(got.inputs, batch.inputs)


def test_sampled_texts_follow_the_models_law_and_end_where_it_ends():
    rows, width = 20_000, 2
    model = tables.table_model(3, vocab_size=4, depth=2)
    got = texts.rewrite(model, batch_of(rows, width), KEY, 5, temperature=1.0)
    law = np.exp(np.asarray(model.logits[0], np.float64))
    counts = np.bincount(got.targets[:, 0], minlength=4)
    assert stats.chisquare(counts, rows * law / law.sum()).pvalue > 1e-3
    ended = np.asarray(got.targets[:, 0] == 1)
    assert 0 < ended.sum() < rows
    # After the end nothing counts; a text without an end fills its room and has none.
    lengths = np.asarray(got.targets_mask).sum(1)
    np.testing.assert_array_equal(lengths, np.where(ended, 1, width))


def test_another_step_draws_other_texts_and_the_same_step_the_same():
    model = tables.table_model(3, vocab_size=4, depth=2)
    first, again, other = (
        texts.rewrite(model, batch_of(64, 2), KEY, number, temperature=1.0).targets
        for number in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(truth=0.5), "add up to 0.5, not to 1"),
        (dict(truth=1.5, draft=-0.5), "m.truth is 1.5: from 0 to 1"),
        (dict(temperature=0.0), "m.temperature is 0.0: a number above 0"),
        (dict(temperature=0.5), "m.temperature is 0.5 and m.truth 1: no model writes"),
        (dict(temperature=None), "m.temperature is None and m.truth 1: no model wri"),
    ],
)
def test_mixtures_that_mean_nothing(settings, message):
    with pytest.raises(errors.InputError, match=message):
        texts.check_mixture(texts.Mixture(**settings), "m")
