"""Greedy speculation writes, token for token, what greedy decoding writes.

Most cases use a model whose logits are a table row chosen by a hash of all that it may
see, so that results are exact at any shape; T5 itself is checked at the same claims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    NgramDrafter,
    Sampling,
    autoregressive_generate,
    speculative_generate,
)
from tests.helpers import (
    ChainModel,
    HashModel,
    greedy_text,
    hash_pair,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GREEDY = Sampling(temperature=None)
WIDTH, LENGTH = 9, 28


def both(target, drafter, rows, *, gamma, sampling=GREEDY, sources=None, **options):
    """The same decode without and with a draft."""
    inputs, mask = sources or ragged_sources(0, rows, WIDTH)
    options = {"max_length": LENGTH, "eos_id": -1, **options}
    common = (inputs, mask, row_keys(0, rows))
    plain = autoregressive_generate(target, *common, sampling=sampling, **options)
    fast = speculative_generate(
        target, drafter, *common, sampling=sampling, gamma=gamma, **options
    )
    return plain, fast


def assert_same(plain, fast) -> None:
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    np.testing.assert_array_equal(fast.length, plain.length)
    np.testing.assert_array_equal(fast.stats.emitted, plain.stats.emitted)
    assert (fast.stats.target_calls <= plain.stats.target_calls).all()


def assert_mixed(fast) -> None:
    """Some drafts were accepted and some rejected, or the test has shown nothing."""
    drafted, accepted = fast.stats.drafted, fast.stats.accepted
    assert 0 < accepted.sum() < drafted.sum()
    first = accepted[:, 0].sum() / drafted[:, 0].sum()
    assert 0.3 < first < 0.9, (accepted.sum(0), drafted.sum(0))


SLOW = pytest.mark.slow
SHAPES = [
    pytest.param(gamma, rows, marks=() if rows == 7 or gamma in (3, 8) else SLOW)
    for gamma in range(1, 9)
    for rows in (1, 2, 7)
]


@pytest.mark.parametrize(("gamma", "rows"), SHAPES)
def test_every_gamma_batch_budget_and_eos(gamma, rows):
    target, draft = hash_pair()
    drafter = ModelDrafter(draft)
    budget = jnp.full(rows, LENGTH)
    plain, fast = both(target, drafter, rows, gamma=gamma, budget=budget)
    assert_same(plain, fast)
    assert_mixed(fast)

    # The baseline itself, against a decoder on the host.
    inputs, mask = ragged_sources(0, rows, WIDTH)
    for row in range(rows):
        source = np.asarray(inputs)[row, np.asarray(mask)[row]].tolist()
        text = greedy_text(target, source, [0], LENGTH - 1)
        assert plain.tokens[row].tolist() == text

    for most in range(1, 2 * gamma + 2):  # another budget in each row
        budget = 1 + (most + jnp.arange(rows)) % (2 * gamma + 1)
        short, fast = both(target, drafter, rows, gamma=gamma, budget=budget)
        assert_same(short, fast)
        np.testing.assert_array_equal(fast.length, 1 + budget)
        np.testing.assert_array_equal(fast.stats.emitted, budget)

    written = np.asarray(plain.tokens)
    for place in range(1, 2 * gamma + 2):  # EOS first, inside a block, at its end
        eos_id = int(written[place % rows, place])
        ended, fast = both(target, drafter, rows, gamma=gamma, eos_id=eos_id)
        assert_same(ended, fast)
        row = fast.tokens[place % rows].tolist()
        first = row.index(eos_id, 1)
        assert (
            first <= place
            and row[: first + 1] == written[place % rows][: first + 1].tolist()
        )
        assert not any(row[first + 1 :])


def test_exact_ties():
    """Logits of three levels: the lowest best id in plain, draft and verify paths."""
    target, draft = (HashModel(jnp.round(model.table / 3)) for model in hash_pair())
    best = target.table == target.table.max(-1, keepdims=True)
    assert (best.sum(-1) > 1).mean() > 0.5
    plain, fast = both(target, ModelDrafter(draft), 7, gamma=4)
    assert_same(plain, fast)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
    # All logits equal: id 0 for ever, and every draft accepted.
    flat = HashModel(jnp.zeros_like(target.table))
    plain, fast = both(flat, ModelDrafter(flat), 7, gamma=4)
    assert_same(plain, fast)
    assert (fast.tokens == 0).all() and (fast.length == LENGTH).all()
    assert (fast.stats.accepted == fast.stats.drafted).all()


@pytest.mark.parametrize("gamma", [4, pytest.param(1, marks=SLOW)])
def test_ragged_prefixes_and_stop_sequences(gamma):
    """Decoder prompts of 1, 2, gamma, gamma + 1; stops across block borders."""
    target, draft = hash_pair()
    rows, columns = 6, gamma + 2
    generator = np.random.default_rng(0)
    prefix = jnp.asarray(generator.integers(0, 64, (rows, columns)), jnp.int32)
    lengths = [1, 2, max(gamma, 1), gamma + 1, columns, 2]
    options = dict(
        gamma=gamma,
        prefix=prefix,
        prefix_length=jnp.array(lengths),
        log_probs=True,
    )
    never = jnp.full((3, 3), -1).at[:, 0].set(70)
    plain, fast = both(target, ModelDrafter(draft), rows, stop=never, **options)
    assert_same(plain, fast)
    assert_mixed(fast)
    np.testing.assert_array_equal(plain.log_probs, fast.log_probs)
    inputs, mask = ragged_sources(0, rows, WIDTH)
    for row, length in enumerate(lengths):
        source = np.asarray(inputs)[row, np.asarray(mask)[row]].tolist()
        text = greedy_text(
            target, source, prefix[row, :length].tolist(), LENGTH - length
        )
        assert plain.tokens[row].tolist() == text

    # Whatever two or three tokens row 2 wrote at each place now end it there.
    written, start = np.asarray(plain.tokens), lengths[2]
    for place in range(start, start + 2 * gamma + 2):
        for size in (1, 2, 3):
            if place - size + 1 < start:
                continue
            stop = never.at[1, :size].set(written[2, place - size + 1 : place + 1])
            ended, fast = both(target, ModelDrafter(draft), rows, stop=stop, **options)
            assert_same(ended, fast)
            assert fast.length[2] <= place + 1
            if size == 3:  # long enough to be unique
                assert fast.length[2] == place + 1
                assert not fast.tokens[2, place + 1 :].any()
                assert fast.tokens[2, place] == written[2, place]
    # A sequence that begins in the prefix is none: the prefix was not written.
    straddling = written[2, start - 1 : start + 1]
    stop = never.at[0, :2].set(straddling)
    _, fast = both(target, ModelDrafter(draft), rows, stop=stop, **options)
    assert fast.length[2] > start + 1


@pytest.mark.parametrize(
    ("draft_vocab", "num_tokens"),
    [
        (60, None),
        (72, 58),
        pytest.param(60, 58, marks=SLOW),
        pytest.param(72, None, marks=SLOW),
    ],
)
def test_other_vocabulary_padding(draft_vocab, num_tokens):
    """Draft and target differ in dead rows; ids from `num_tokens` on never appear."""
    target, draft = hash_pair(draft_vocab=draft_vocab)
    if num_tokens is not None:  # dead rows would win, were they not ruled out
        target = HashModel(target.table.at[:, num_tokens:].add(9.0))
    else:
        draft = HashModel(draft.table.at[:, 64:].add(9.0))
    sampling = Sampling(temperature=None, num_tokens=num_tokens)
    plain, fast = both(target, ModelDrafter(draft), 7, gamma=4, sampling=sampling)
    assert_same(plain, fast)
    assert_mixed(fast)
    assert fast.tokens.max() < (num_tokens or 64)


@pytest.mark.parametrize("gamma", [2, 8])
def test_ngram_drafts(gamma):
    """Text that repeats, a source of one word 48 times, and prompts of 1."""
    generator = np.random.default_rng(0)
    table = generator.normal(size=(64, 64))
    sources = (jnp.full((4, 48), 9, jnp.int32), jnp.ones((4, 48), bool))
    prefix = jnp.full((4, 6), 9, jnp.int32)
    for step in range(3):
        # From id 9 on: 9 again, a cycle of three, a long walk.
        table[9] = 0
        table[9, (9, 11, 12)[step]] = 5
        table[11, 13], table[13, 9] = 9, 9
        target = ChainModel(jnp.asarray(table, jnp.float32))
        plain, fast = both(
            target,
            NgramDrafter(max_ngram=2),
            4,
            gamma=gamma,
            sources=sources,
            prefix=prefix,
            prefix_length=jnp.array([1, 2, 5, 6]),
        )
        assert_same(plain, fast)
        assert fast.stats.accepted.sum() > 0


T5_SHAPES = [
    pytest.param(gamma, rows, marks=() if (gamma, rows) in ((3, 7), (3, 1)) else SLOW)
    for gamma in range(1, 9)
    for rows in (1, 2, 7)
]


@pytest.fixture(scope="module")
def t5_pair():
    target = tiny_t5(0)
    return target, perturbed(target, 1, 0.1)


@pytest.mark.parametrize(("gamma", "rows"), T5_SHAPES)
def test_t5(t5_pair, gamma, rows):
    """Ragged sources and budgets, and EOS at each place of a block."""
    target, draft = t5_pair
    drafter = ModelDrafter(draft)
    plain, fast = both(target, drafter, rows, gamma=gamma)
    assert_same(plain, fast)
    assert_mixed(fast)
    budget = 1 + (jnp.arange(rows) + gamma) % (2 * gamma + 1)
    short, fast = both(target, drafter, rows, gamma=gamma, budget=budget)
    assert_same(short, fast)
    for place in range(1, 2 * gamma + 2):
        eos_id = int(plain.tokens[place % rows, place])
        ended, fast = both(target, drafter, rows, gamma=gamma, eos_id=eos_id)
        assert_same(ended, fast)


@pytest.mark.parametrize("kind", ["ngram", pytest.param("other size", marks=SLOW)])
def test_t5_with_other_drafters(t5_pair, kind):
    """N-grams over a repeated word; a draft of another shape, family and padding."""
    target, _ = t5_pair
    if kind == "ngram":
        drafter = NgramDrafter()
        sources = (jnp.full((7, 48), 9, jnp.int32), jnp.ones((7, 48), bool))
    else:
        shape = dict(vocab_size=72, d_model=8, num_heads=2, num_decoder_layers=1)
        drafter = ModelDrafter(
            tiny_t5(3, **shape, gated=False, activation="relu", tied_head=True)
        )
        sources = None
    sampling = Sampling(temperature=None, num_tokens=60)
    plain, fast = both(target, drafter, 7, gamma=3, sampling=sampling, sources=sources)
    assert_same(plain, fast)
    assert fast.stats.drafted.sum() > fast.stats.accepted.sum()
    assert fast.tokens.max() < 60


def test_oracle_is_not_blind():
    """A stale token in the cache changes what the hash model says."""
    target, _ = hash_pair()
    encoded = target.encode(*ragged_sources(0, 1, WIDTH))
    cache = target.init_cache(1, 8)
    _, cache = target.decode(jnp.array([[0, 5, 6]]), cache, encoded)
    right, _ = target.decode(jnp.array([[7]]), cache, encoded)
    wrong, _ = target.decode(
        jnp.array([[7]]), cache.replace(memory=cache.memory.at[0, 1].set(4)), encoded
    )
    assert not jnp.array_equal(right.logits, wrong.logits)
    full, _ = target.decode(jnp.array([[0, 5, 6, 7]]), None, encoded)
    np.testing.assert_array_equal(full.logits[:, 3:], right.logits)
    assert jax.tree.leaves(encoded)
