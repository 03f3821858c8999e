"""`specjax.load`: texts through a pair are what the functions below it write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import InputError, NgramDrafter, Sampling
from specjax.controls import NoRepeatNgram
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


@pytest.mark.slow
def test_several_samples_and_a_seed_per_row(pair):
    """Each sample is a row with its own noise, temperature and budget."""
    options = dict(sampling=Sampling(), gamma=3, **OPTIONS)
    three = pair.generate(LINES[:2], samples=3, **options)
    assert len(three.texts) == 6 and len(set(three.texts[:3])) == 3
    again = pair.generate([LINES[0]] * 3 + [LINES[1]] * 3, **options)
    assert again.texts == three.texts
    seeds = pair.generate(LINES[:2], samples=3, seed=[5, 5, 6, 7, 8, 9], **options)
    assert seeds.texts[0] == seeds.texts[1] != seeds.texts[2]
    for row, (line, seed) in enumerate([(LINES[0], 6), (LINES[1], 7)], start=2):
        assert pair.generate([line], seed=seed, **options).texts == [seeds.texts[row]]
    own = Sampling(temperature=jnp.array([0.0, 0.0, 1.0]))
    budget = jnp.array([4, 9, 9])
    mixed = pair.generate(
        LINES[:1], samples=3, sampling=own, budget=budget, gamma=3, **OPTIONS
    )
    first, second, third = np.asarray(mixed.output.tokens)
    assert (first[:5] == second[:5]).all() and not first[5:].any()
    assert (second != third).any()


@pytest.mark.slow
def test_beams_and_controls(pair):
    """The target alone; the best text; what is set for rows holds for each."""
    alone = dataclasses.replace(pair, drafter=None)
    greedy = alone.generate(LINES, **OPTIONS)
    assert alone.generate(LINES, beams=1, **OPTIONS).texts == greedy.texts
    many = alone.generate(LINES, beams=3, **OPTIONS)
    assert many.output.tokens.shape[:2] == (3, 3) and len(many.texts) == 3
    assert many.output.tokens.max() < pairs.KNOWN
    once = Sampling(temperature=None, controls=(NoRepeatNgram(1),))
    made = pair.generate(LINES, sampling=once, gamma=3, **OPTIONS)
    assert made.texts == alone.generate(LINES, sampling=once, **OPTIONS).texts
    for free, own, length in zip(
        greedy.output.tokens, made.output.tokens, made.output.length, strict=True
    ):
        assert len(set(own[:length].tolist())) == length
        assert len(set(free.tolist())) < len(free)


def test_refusals(folders, pair):
    with pytest.raises(InputError, match=r"beams is 4 and there is a drafter: .*None"):
        pair.generate(LINES, beams=4)
    with pytest.raises(InputError, match="samples is 2 and the sampling is greedy"):
        pair.generate(LINES, samples=2)
    with pytest.raises(InputError, match="samples is 0: a whole number"):
        pair.generate(LINES, samples=0)
    with pytest.raises(InputError, match=r"seed has 2 numbers: one, or .* \(3\)"):
        pair.generate(LINES, seed=[1, 2])
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
