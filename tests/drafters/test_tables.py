"""Counted drafts: the law that the docstring says, and what the target still writes."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import InputError, Sampling, autoregressive_generate, speculative_generate
from specjax.drafters import files
from specjax.drafters.tables import BigramDrafter, UnigramDrafter, count_tables
from specjax.proof.tables import table_model
from tests.drafters import laws
from tests.helpers import hash_pair, ragged_sources, row_keys

TEXTS = [[3, 4, 3, 4, 1], [3, 2, 1], [], [4, 4]]
VOCAB = 6


def by_hand(texts, vocab_size: int, successors: int):
    """The unigram law and the bigram laws, written as the docstrings say them."""
    after = [token for text in texts for token in text]
    seen = max(len(set(after)), 1)
    unigram = np.array(
        [
            (after.count(x) + seen / vocab_size) / (len(after) + seen)
            for x in range(vocab_size)
        ]
    )
    pairs = [pair for text in texts for pair in zip([0, *text], text, strict=False)]
    bigram = np.zeros((vocab_size, vocab_size))
    for x in range(vocab_size):
        counts = {y: pairs.count((x, y)) for y in range(vocab_size)}
        total, seen = sum(counts.values()), sum(n > 0 for n in counts.values())
        ranked = sorted(counts, key=lambda y: (-counts[y], y))[:successors]
        kept = np.array([counts[y] * (y in ranked) for y in range(vocab_size)])
        left = total + max(seen, 1) - kept.sum()
        bigram[x] = (kept + left * unigram) / (total + max(seen, 1))
    return unigram, bigram


@pytest.mark.parametrize("successors", [1, 2, 8])
@pytest.mark.parametrize("seed", [None, 0])
def test_the_law_is_the_written_one(seed, successors):
    texts = TEXTS
    if seed is not None:
        generator = np.random.default_rng(seed)
        sizes = generator.integers(0, 9, 30)
        texts = [generator.integers(0, VOCAB - 1, size).tolist() for size in sizes]
    bigram = count_tables(texts, VOCAB, successors=successors)
    unigram_law, bigram_law = by_hand(texts, VOCAB, successors)
    last = jnp.arange(VOCAB)
    np.testing.assert_allclose(bigram.probs(last), bigram_law, rtol=1e-5)
    for row in bigram.unigram.probs(last):
        np.testing.assert_allclose(row, unigram_law, rtol=1e-5)
    assert (bigram_law > 0).all() and np.allclose(bigram_law.sum(1), 1)


def test_a_small_corpus():
    """The figures themselves: ten tokens of four ids, six ids in all."""
    bigram = count_tables(TEXTS, VOCAB)
    first = np.asarray(bigram.unigram.probs(jnp.array([5])))[0]
    np.testing.assert_allclose(first[3], (3 + 4 / 6) / 14, rtol=1e-6)
    np.testing.assert_allclose(first[5], 4 / 6 / 14, rtol=1e-6)
    after = np.asarray(bigram.probs(jnp.array([0, 5])))
    # The start token is followed by 3, 3 and 4: five shares of one each.
    np.testing.assert_allclose(after[0, 3], (2 + 2 * first[3]) / 5, rtol=1e-6)
    # Nothing ever followed 5.
    np.testing.assert_allclose(after[1], first, rtol=1e-6)


def test_nothing_counted_is_the_flat_law():
    for drafter in (
        UnigramDrafter.create(table_model(0, 5, 1), {}, jax.random.key(0)),
        BigramDrafter.create(table_model(0, 5, 1), {}, jax.random.key(0)),
    ):
        np.testing.assert_allclose(drafter.probs(jnp.arange(3)), 0.2, rtol=1e-6)


def test_a_file_holds_them(tmp_path):
    target = hash_pair(vocab_size=VOCAB)[0]
    bigram = count_tables(TEXTS, VOCAB, successors=2)
    for made in (bigram, bigram.unigram):
        files.save_drafter(made, tmp_path / made.kind, "f" * 64)
        read = files.load_drafter(
            type(made), tmp_path / made.kind, target, "f" * 64, dtype=jnp.float32
        )
        assert jax.tree.structure(read) == jax.tree.structure(made)
        jax.tree.map(np.testing.assert_array_equal, read, made)
    size = (tmp_path / "bigram" / files.ARRAYS_FILE).stat().st_size
    assert size < 4 * VOCAB * (2 * 2 + 3) + 600  # arrays of V x K, none of V x V


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_tables([[1], [2, 6]], 6), r"rows\[1\]\[1\] is 6.*0 to 5"),
        (lambda: count_tables([[-1]], 6), r"rows\[0\]\[0\] is -1"),
        (lambda: count_tables([], 6, successors=0), "successors is 0"),
        (lambda: create(BigramDrafter, successors=-2), "successors is -2"),
        (lambda: create(BigramDrafter, order=2), "no setting 'order'.*successors"),
        (lambda: create(UnigramDrafter, order=2), "no setting 'order': it has none"),
        (lambda: generate(count_tables([], 7), VOCAB), "counts of 7 ids.*target 6"),
        (
            lambda: generate(count_tables([], 6).replace(rule=Hidden()), VOCAB),
            "rule Hidden reads hidden states and BigramDrafter has none",
        ),
    ],
)
def test_what_means_nothing_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def create(kind, **settings):
    return kind.create(table_model(0, 5, 1), settings, jax.random.key(0))


@struct.dataclass
class Hidden:
    """A rule of the length that needs what no table has."""

    reads_hidden: ClassVar[bool] = True


def generate(drafter, vocab_size, rows=6, sampling=None, **options: Any):
    inputs, mask = ragged_sources(0, rows, 5, vocab_size)
    target = hash_pair(vocab_size=vocab_size)[0]
    arguments = (inputs, mask, row_keys(0, rows))
    options = dict(
        sampling=sampling or Sampling(temperature=None), max_length=20, eos_id=-1
    )
    plain = autoregressive_generate(target, *arguments, **options)
    return plain, speculative_generate(target, drafter, *arguments, gamma=3, **options)


@struct.dataclass
class OneThenTwo:
    """A rule: blocks of one and of two tokens by turns."""

    reads_hidden: ClassVar[bool] = False

    def init(self, batch):
        return jnp.zeros(batch, jnp.int32)

    def begin(self, state, gamma):
        return 1 + state % 2, state

    def go_on(self, state, signal):
        return jnp.ones_like(state, bool), state

    def commit(self, state, drafted, num_accepted):
        return state + 1


@pytest.mark.slow
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("kind", ["unigram", "bigram"])
def test_greedy_text_is_the_targets(kind, ruled):
    plain, _ = generate(count_tables([], VOCAB), VOCAB)
    bigram = count_tables(np.asarray(plain.tokens)[:3, 1:], VOCAB, successors=3)
    drafter = {"unigram": bigram.unigram, "bigram": bigram}[kind]
    _, fast = generate(drafter.replace(rule=OneThenTwo() if ruled else None), VOCAB)
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    drafted, accepted = fast.stats.drafted, fast.stats.accepted
    assert 0 < accepted.sum() < drafted.sum()
    assert (drafted[:, 2].sum() == 0) == ruled
    if ruled:
        assert 0 < drafted[:, 1].sum() < drafted[:, 0].sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unigram", "bigram"])
def test_joint_law(kind):
    """What is written has the target's law; a draft that reports another law has not.

    The twin reports the law of a model that did not draw.
    """
    target, model = table_model(0, 4, 3), table_model(1, 4, 3)
    texts = np.random.default_rng(2).integers(0, 4, (9, 5))
    bigram = count_tables(texts, 4, successors=2)
    drafter = {"unigram": bigram.unigram, "bigram": bigram}[kind]
    laws.check_joint_law(target, target, drafter, model, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unigram", "bigram"])
def test_rows_are_independent(kind):
    target = hash_pair()[0]
    texts = np.random.default_rng(2).integers(0, 64, (30, 9))
    bigram = count_tables(texts, 64, successors=4)
    laws.check_rows(target, {"unigram": bigram.unigram, "bigram": bigram}[kind])
