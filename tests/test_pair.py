"""`specjax.load`: texts through a pair are what the functions below it write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import InputError, NgramDrafter, Sampling
from specjax.data.batches import pad_to_bucket
from tests import pairs
from tests.helpers import quick_compile  # noqa: F401


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folders):
    return specjax.load(folders.target, str(folders.draft))


LINES = list(pairs.LINES[:3])
OPTIONS = dict(max_length=16)


def test_generate(folders, pair):
    """The same text with a draft, without one, and by hand; no dead row is written."""
    made = pair.generate(LINES, gamma=3, **OPTIONS)
    assert made.output.stats.accepted.sum() > 0
    alone = specjax.load(folders.target).generate(LINES, **OPTIONS)
    assert made.texts == alone.texts and alone.output.stats.drafted.size == 0
    inputs, mask = pad_to_bucket([pair.tokenizer.encode(line) for line in LINES], 32)
    by_hand = specjax.autoregressive_generate(
        pair.target,
        jnp.asarray(inputs),
        jnp.asarray(mask),
        jax.random.split(jax.random.key(0), 3),
        sampling=Sampling(temperature=None, num_tokens=pairs.KNOWN),
        **OPTIONS,
    )
    np.testing.assert_array_equal(by_hand.tokens, made.output.tokens)
    first = by_hand.tokens[0, 1 : int(by_hand.length[0])].tolist()
    assert made.texts[0] == pair.tokenizer.decode(first)
    assert pair.num_tokens == pairs.KNOWN


@pytest.mark.slow
def test_another_drafter_and_a_prefix(pair):
    copying = dataclasses.replace(pair, drafter=NgramDrafter())
    plain = pair.generate(LINES[:1], gamma=3, **OPTIONS)
    assert copying.generate(LINES[:1], gamma=3, **OPTIONS).texts == plain.texts
    tokens = plain.output.tokens
    again = pair.generate(LINES[:1], gamma=3, prefix=tokens[:, :4], **OPTIONS)
    np.testing.assert_array_equal(again.output.tokens, tokens)
    # The text is what was written after the prefix.
    rest = tokens[0, 4 : int(plain.output.length[0])].tolist()
    assert again.texts == [pair.tokenizer.decode(rest)]


@pytest.mark.slow
def test_seeds_and_sampling(pair):
    def sampled(seed):
        return pair.generate(LINES, seed=seed, sampling=Sampling(), gamma=3, **OPTIONS)

    assert sampled(0).texts == sampled(0).texts != sampled(1).texts
    assert max(sampled(0).output.tokens.ravel()) < pairs.KNOWN


def test_refusals(folders, pair):
    with pytest.raises(InputError, match="no source to decode"):
        pair.generate([])
    with pytest.raises(InputError, match=r"sources is one text: give a list"):
        pair.generate("the program")
    with pytest.raises(InputError, match=r"sources\[1\] is empty"):
        pair.generate([LINES[0], " "])
    with pytest.raises(InputError, match="there is no folder"):
        specjax.load("absent")
    with pytest.raises(InputError, match="no model 'none' ships here"):
        specjax.load("zoo/none")
    with pytest.raises(InputError, match="top_p is 0"):
        pair.generate(LINES, sampling=Sampling(top_p=0.0), **OPTIONS)


@pytest.mark.slow
def test_a_smaller_vocabulary_of_the_callers_own_stands(pair):
    few = Sampling(temperature=1.0, num_tokens=20)
    made = pair.generate(LINES, sampling=few, **OPTIONS)
    assert 0 < max(made.output.tokens.ravel()) < 20


def test_it_shows_itself_on_one_line(pair):
    assert "ModelDrafter" in repr(pair) and len(repr(pair)) < 100
