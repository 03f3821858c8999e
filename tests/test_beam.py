"""Beam search: by brute force, against a slow search, and greedy with one beam."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import InputError, Sampling, autoregressive_generate, beam, beam_generate
from specjax.controls import MinLength, NoRepeatNgram
from specjax.proof.tables import stacked, table_model
from tests.helpers import (
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

EOS = 2


def texts_of(output, row):
    """The row's texts that there are: tokens, score, whether whole; best first."""
    return [
        (
            output.tokens[row, k, : output.length[row, k]].tolist(),
            float(output.score[row, k]),
            bool(output.finished[row, k]),
        )
        for k in range(output.score.shape[1])
        if output.score[row, k] > -np.inf
    ]


def assert_like(found, wanted) -> None:
    assert [own[0] for own in found] == [own[0] for own in wanted]
    assert [own[2] for own in found] == [own[2] for own in wanted]
    np.testing.assert_allclose(
        [own[1] for own in found], [own[1] for own in wanted], atol=1e-4
    )


def test_enough_beams_find_all_texts_in_order():
    """Brute force over a table: every text, at three strengths of the penalty."""
    vocab_size, depth, rows = 4, 3, 2
    tables = [table_model(seed, vocab_size, depth) for seed in range(rows)]
    for alpha in (0.0, 0.6, 2.0):
        output = beam_generate(
            stacked(tables),
            jnp.arange(rows, dtype=jnp.int32)[:, None],
            jnp.ones((rows, 1), bool),
            beams=120,
            alpha=alpha,
            max_length=depth + 2,
            eos_id=EOS,
        )
        for row, table in enumerate(tables):
            logits = np.asarray(table.logits, np.float64)
            laws = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            every = []
            for size in range(1, depth + 2):
                for text in itertools.product(range(vocab_size), repeat=size):
                    whole = text[-1] == EOS
                    if EOS in text[:-1] or not (whole or size == depth + 1):
                        continue
                    index, total = 0, 0.0
                    for token in text:
                        total += laws[index, token]
                        index = index * vocab_size + token + 1
                    score = total / ((5 + size) / 6) ** alpha
                    every.append(([0, *text], score, whole))
            every.sort(key=lambda own: (not own[2], -own[1]))
            found = texts_of(output, row)
            assert len(every) == 40 + 81 and len(found) == 120
            assert_like(found, every[:120])
    best = {tuple(own) for own in output.tokens[:, 0].tolist()}
    assert len(best) == rows


ROWS, WIDTH, LENGTH, BEAMS = 5, 9, 18, 3
TARGET = hash_pair(vocab_size=12)[0]
PREFIX = jnp.asarray([[0, 3], [0, 4], [0, 9], [0, 9], [0, 5]], jnp.int32)
PREFIXES = jnp.array([1, 2, 1, 2, 1], jnp.int32)
BUDGET = jnp.array([17, 9, 40, 0, 12], jnp.int32)
SIZES = jnp.array([2, 99, 2, 2, 1], jnp.int32)
LEAST = jnp.array([1, 8, 12, 1, 1], jnp.int32)
CONTROLS = (NoRepeatNgram(SIZES), MinLength(LEAST, EOS))
OPTIONS = dict(
    sampling=Sampling(temperature=None, num_tokens=11, controls=CONTROLS),
    max_length=LENGTH,
    budget=BUDGET,
    prefix=PREFIX,
    prefix_length=PREFIXES,
    eos_id=EOS,
)


def search(row, source, beams, alpha):
    """The search written anew: lists of texts, one pass of the table per text."""
    table = np.asarray(TARGET.table, np.float64)
    fixed = sum((token + 1) * (31 * i + 7) for i, token in enumerate(source))
    start = int(PREFIXES[row])
    limit = min(start + int(BUDGET[row]), LENGTH)

    def log_law(text):
        seen = sum((token + 1) * (17 * i + 3) for i, token in enumerate(text))
        logits = table[(seen + fixed) % len(table)].copy()
        logits[11:] = -np.inf
        n = int(SIZES[row])
        grams = [text[i : i + n] for i in range(len(text) - n + 1)]
        for gram in grams:
            if gram[:-1] == text[len(text) - n + 1 :]:
                logits[gram[-1]] = -np.inf
        if len(text) + 1 < int(LEAST[row]):
            logits[EOS] = -np.inf
        return logits - np.log(np.exp(logits).sum())

    def score(text, total):
        return total / ((5 + len(text) - start) / 6) ** alpha

    going, whole = [(PREFIX[row, :start].tolist(), 0.0)], []
    while len(whole) < beams and len(going[0][0]) < limit:
        ranked = sorted(
            (
                ([*text, token], total + own)
                for text, total in going
                for token, own in enumerate(log_law(text))
                if own > -np.inf
            ),
            key=lambda own: -own[1],
        )[: 2 * beams]
        ends = [own for own in ranked[:beams] if own[0][-1] == EOS]
        whole += [(text, score(text, total), True) for text, total in ends]
        whole = sorted(whole, key=lambda own: -own[1])[:beams]
        going = [own for own in ranked if own[0][-1] != EOS][:beams]
    cut = [(text, score(text, total), False) for text, total in going]
    return [*whole, *cut][:beams]


@pytest.mark.parametrize("alpha", [0.6, -1.5])
def test_a_slow_search_finds_the_same(alpha):
    """Ragged sources, prefixes and budgets; controls by row; EOS and the cut."""
    inputs, mask = ragged_sources(1, ROWS, WIDTH, 12)
    output = beam_generate(TARGET, inputs, mask, beams=BEAMS, alpha=alpha, **OPTIONS)
    for row in range(ROWS):
        source = np.asarray(inputs)[row, np.asarray(mask)[row]].tolist()
        assert_like(texts_of(output, row), search(row, source, BEAMS, alpha))
    assert output.finished.any() and not output.finished.all()
    column = jnp.arange(LENGTH)[None, None]
    assert not jnp.where(column >= output.length[..., None], output.tokens, 0).any()
    assert output.target_calls[3] == 0 and output.target_calls[2] > 9


def test_one_beam_is_greedy_decoding():
    sources = ragged_sources(1, ROWS, WIDTH, 12)
    plain = autoregressive_generate(TARGET, *sources, row_keys(0, ROWS), **OPTIONS)
    one = beam_generate(TARGET, *sources, beams=1, **OPTIONS)
    np.testing.assert_array_equal(one.tokens[:, 0], plain.tokens)
    np.testing.assert_array_equal(one.length[:, 0], plain.length)
    np.testing.assert_array_equal(one.target_calls, plain.stats.target_calls)
    several = beam_generate(TARGET, *sources, beams=BEAMS, **OPTIONS)
    assert (several.tokens[:, 0] != plain.tokens).any()
    assert (several.score[:, 0] >= one.score[:, 0])[one.finished[:, 0]].any()


def test_new_numbers_compile_nothing():
    sources = ragged_sources(1, ROWS, WIDTH, 12)
    beam_generate(TARGET, *sources, beams=BEAMS, **OPTIONS)
    before = beam._beam_loop._cache_size()
    for changed in ({"alpha": 1}, {"budget": 5}):
        beam_generate(TARGET, *sources, beams=BEAMS, **OPTIONS | changed)
    assert beam._beam_loop._cache_size() == before


@pytest.mark.slow
def test_t5_scores_are_those_of_its_texts():
    """Teacher forcing gives each text the log-probability that the search found."""
    target = tiny_t5(0)
    inputs, mask = ragged_sources(0, 2, WIDTH)
    output = beam_generate(
        target, inputs, mask, beams=BEAMS, alpha=0.0, max_length=12, eos_id=EOS
    )

    @jax.jit
    def total(tokens, length):
        given, _ = target.decode(tokens[:, :-1], None, target.encode(inputs, mask))
        laws = jax.nn.log_softmax(given.logits, axis=-1)
        own = jnp.take_along_axis(laws, tokens[:, 1:, None], axis=-1)[..., 0]
        real = jnp.arange(1, tokens.shape[1])[None] < length[:, None]
        return jnp.sum(jnp.where(real, own, 0.0), axis=1)

    for k in range(BEAMS):
        score = total(output.tokens[:, k], output.length[:, k])
        np.testing.assert_allclose(output.score[:, k], score, atol=1e-4)
    assert (output.tokens[:, 0] != output.tokens[:, 1]).any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"beams": 0}, "beams is 0: a whole number of texts, at least 1"),
        ({"alpha": float("nan")}, "alpha is nan: a finite number"),
        ({"sampling": Sampling()}, "beam search draws none"),
        ({"sampling": Sampling(temperature=None, top_k=3)}, "beam search draws none"),
        ({"max_length": 1}, "max_length is 1"),
        ({"eos_id": 5}, "MinLength.eos_id is 2 and rows end at eos_id 5"),
    ],
)
def test_refusals(changes, words):
    sources = ragged_sources(1, ROWS, WIDTH, 12)
    with pytest.raises(InputError, match=words):
        beam_generate(TARGET, *sources, **OPTIONS | changes)
