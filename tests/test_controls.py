"""Controls: against a slow reference, with a draft as without, at no cost unused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    InputError,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    TreeDrafter,
    autoregressive_generate,
    decoding,
    speculative_generate,
)
from specjax.controls import (
    BannedSequences,
    BannedTokens,
    CountPenalty,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    apply_control,
)
from specjax.proof.tables import stacked, table_model
from specjax.sampling import check_sampling
from specjax.types import Prefix
from tests.control_cases import CASES, EOS, Lying, Nothing, by_row, reference
from tests.helpers import (
    hash_pair,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

SIZE, IDS = 12, 9  # of the texts below; few ids, so that they repeat themselves
EDIT = jax.jit(lambda controls, *given: Sampling(controls=controls).edited(*given))
SPREAD = [case for case in CASES.values() for _ in range(4)]


def edited(cases, logits, texts) -> np.ndarray:
    """Every case at every place of its text, by one program."""
    places = np.broadcast_to(np.arange(1, SIZE + 1), (len(texts), SIZE))
    prefix = Prefix(
        tokens=jnp.asarray(texts, jnp.int32), length=jnp.asarray(places, jnp.int32)
    )
    return np.asarray(EDIT(by_row(cases), jnp.asarray(logits, jnp.float32), prefix))


def test_each_control_equals_its_reference():
    generator = np.random.default_rng(0)
    texts = generator.integers(2, IDS, (len(SPREAD), SIZE))
    texts[1::4] = generator.integers(5, 7, (len(texts[1::4]), SIZE))
    logits = generator.normal(size=(len(SPREAD), SIZE, IDS)) * 3
    logits[2::4, :, 8] = -np.inf
    found, changed = edited(SPREAD, logits, texts), 0
    for row, case in enumerate(SPREAD):
        for place in range(1, SIZE + 1):
            text, given = texts[row, :place].tolist(), logits[row, place - 1]
            wanted = reference(given, text, case)
            np.testing.assert_allclose(found[row, place - 1], wanted, atol=1e-5)
            changed += not np.allclose(wanted, given)
    assert changed > len(SPREAD) * SIZE / 4


def test_by_hand():
    no, flat = -np.inf, [0.0] * IDS
    # After 0 1 2 3 1 2 the id 3 would repeat a trigram and a bigram, all there an id.
    text = [0, 1, 2, 3, 1, 2]
    hand = [
        # CTRL, with negative logits made worse, not better.
        ({"penalty": 2.0}, [1.0, 3.0, -1.0, 0, -4.0], [0.5, 1.5, -2.0, 0, -4.0]),
        ({"frequency": 1.0, "presence": 0.5}, flat, [-1.5, -2.5, -2.5, -1.5]),
        ({"frequency": 1.0, "start": 4}, flat, [0, -1, -1]),
        ({"size": 3}, flat, [0, 0, 0, no]),
        ({"size": 2}, flat, [0, 0, 0, no]),
        ({"size": 2, "start": 3}, flat, flat),
        ({"size": 1}, flat, [no, no, no, no]),
        ({"size": 4}, flat, flat),
        ({"sequences": ((1, 2, 4), (2, 0), (3, 3))}, flat, [no, 0, 0, 0, no]),
        ({"ids": (3, 0)}, [1.0, 1, 1, 1], [no, 1, 1, no]),
        ({"length": 8}, flat, [0, 0, no]),
        ({"length": 7}, flat, flat),
    ]
    cases = [case for case, _, _ in hand]
    logits = np.zeros((len(SPREAD), SIZE, IDS))
    for row, (_, given, _) in enumerate(hand):
        logits[row, :, : len(given)] = given
    texts = np.full((len(SPREAD), SIZE), 8)  # what follows the prefix is not read
    texts[:, : len(text)] = text
    # A ban of all there is bans nothing.
    texts[-1], logits[-1] = np.arange(SIZE) % IDS, 1.0
    idle = [{}] * (len(SPREAD) - len(hand) - 1)
    found = edited([*cases, *idle, {"size": 1}], logits, texts)
    for row, (case, _, wanted) in enumerate(hand):
        wanted = [*wanted, *[0] * (IDS - len(wanted))]
        np.testing.assert_allclose(found[row, len(text) - 1], wanted, err_msg=str(case))
    np.testing.assert_array_equal(found[-1, IDS - 2], [no] * (IDS - 1) + [1.0])
    np.testing.assert_array_equal(found[-1, IDS - 1], 1.0)


def test_one_number_for_all_rows_and_a_text_for_each_node():
    generator = np.random.default_rng(1)
    tokens = jnp.asarray(generator.integers(0, 4, (2, 9)), jnp.int32)
    length = jnp.array([[3, 6, 9], [4, 5, 8]], jnp.int32)
    logits = jnp.asarray(generator.normal(size=(2, 3, 4)), jnp.float32)
    apply = jax.jit(apply_control)
    wanted = apply(NoRepeatNgram(2), logits, Prefix(tokens=tokens, length=length))
    assert jnp.isinf(wanted).any() and jnp.isfinite(wanted).any()
    # A buffer per position, as trees have it, with other siblings at the end of each.
    several = jnp.repeat(tokens[:, None], 3, axis=1)
    places = jnp.arange(9)[None, None]
    several = jnp.where(places < length[..., None], several, 3)
    for size in (jnp.int32(2), jnp.array([2, 2], jnp.int32)):
        given = Prefix(tokens=several, length=length)
        np.testing.assert_array_equal(apply(NoRepeatNgram(size), logits, given), wanted)


VOCAB, ROWS, WIDTH, LENGTH = 10, 3, 9, 28
# Texts that seldom end, and so repeat themselves.
TARGET, DRAFT = (
    model.replace(table=model.table.at[:, EOS].add(-2.0))
    for model in hash_pair(vocab_size=VOCAB, noise=0.25)
)
MODEL = ModelDrafter(DRAFT)
EACH = [case for case in CASES.values() for _ in range(ROWS)]


def both(target, drafter, cases, *, gamma=4, eos_id=EOS, sources=None):
    """The same rows without and with a draft."""
    sources = sources or ragged_sources(0, len(cases), WIDTH, VOCAB)
    common = (*sources, row_keys(0, len(cases)))
    sampling = Sampling(temperature=None, controls=by_row(cases, eos_id))
    options = dict(sampling=sampling, max_length=LENGTH, eos_id=eos_id)
    plain = autoregressive_generate(target, *common, **options)
    fast = speculative_generate(target, drafter, *common, gamma=gamma, **options)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    np.testing.assert_array_equal(fast.length, plain.length)
    return plain, fast


def test_greedy_speculation_writes_what_plain_decoding_writes_under_each_control():
    plain, fast = both(TARGET, MODEL, EACH)
    free, _ = both(TARGET, MODEL, [{}] * len(EACH))
    inputs, mask = map(np.asarray, ragged_sources(0, len(EACH), WIDTH, VOCAB))
    table = np.asarray(TARGET.table)
    for number, name in enumerate(CASES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        drafted = fast.stats.drafted[rows.start : rows.stop].sum()
        accepted = fast.stats.accepted[rows.start : rows.stop].sum()
        assert 0 < accepted < drafted, name
        assert any((plain.tokens[row] != free.tokens[row]).any() for row in rows), name
        for row in rows:  # a decoder on the host
            text, source = [0], inputs[row, mask[row]].tolist()
            fixed = sum((t + 1) * (31 * i + 7) for i, t in enumerate(source))
            while len(text) < LENGTH and text[1:][-1:] != [EOS]:
                seen = sum((t + 1) * (17 * i + 3) for i, t in enumerate(text))
                logits = table[(seen + fixed) % len(table)]
                text.append(int(np.argmax(reference(logits, text, EACH[row]))))
            assert plain.tokens[row, : plain.length[row]].tolist() == text, name
    assert (plain.length < LENGTH).any() and (plain.length == LENGTH).any()


def test_new_numbers_compile_nothing_and_none_cost_nothing(monkeypatch):
    before = [
        decoding._speculative_loop._cache_size(),
        decoding._autoregressive_loop._cache_size(),
    ]
    both(TARGET, MODEL, EACH)
    once = decoding._speculative_loop._cache_size()
    assert once <= before[0] + 1
    both(TARGET, MODEL, EACH[::-1])
    both(TARGET, MODEL, [{"penalty": 1.7, "ids": (3,), "size": 4}] * len(EACH))
    assert decoding._speculative_loop._cache_size() == once
    assert decoding._autoregressive_loop._cache_size() <= before[1] + 1

    # Without controls no prefix is even made, whatever controls ran before.
    def decode():
        sources = ragged_sources(0, 2, WIDTH, VOCAB)
        return speculative_generate(
            TARGET, MODEL, *sources, row_keys(0, 2), gamma=2, max_length=6
        )

    def fail(*arguments):
        raise AssertionError("a prefix was made")

    monkeypatch.setattr(decoding, "block_prefix", fail)
    decode()
    once = decoding._speculative_loop._cache_size()
    decode()
    assert decoding._speculative_loop._cache_size() == once


def test_a_copying_drafter():
    """It reads no controls, and its drafts are judged by controlled laws."""
    _, fast = both(TARGET, NgramDrafter(max_ngram=1), EACH)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()


@pytest.mark.slow
def test_trees():
    """Each node of a tree of drafts is judged after its own path."""
    vocab_size, depth = 6, 3
    tables = [table_model(seed, vocab_size, depth) for seed in range(4)]
    drafts = [
        table_model(9 + seed, vocab_size, depth, like=own, mix=0.7)
        for seed, own in enumerate(tables)
    ]
    drafter = TreeDrafter(stacked(drafts), (-1, 0, 0, 1, 1, 2), "distinct")
    cases = [own for own in CASES.values() if "sequences" not in own]
    cases = [{**own, "ids": (4,)} for own in cases for _ in range(4)]
    sources = jnp.arange(len(cases), dtype=jnp.int32)[:, None] % len(tables)
    _, fast = both(
        stacked(tables),
        drafter,
        cases,
        gamma=2,
        sources=(sources, jnp.ones(sources.shape, bool)),
    )
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()


@pytest.mark.slow
def test_t5():
    target = tiny_t5(0)
    cases = [CASES["minimum length"], CASES["no id twice"], {"penalty": 1.3}]
    drafter = ModelDrafter(perturbed(target, 1, 0.1))
    _, fast = both(target, drafter, cases, sources=ragged_sources(0, 3, WIDTH))
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()


# Refusals.


@struct.dataclass
class Blind(Lying):
    """Asks for a law without a prefix."""

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        sampling.law(jnp.zeros((len(length), gamma, target.vocab_size)))
        raise AssertionError("it was not refused")


def decode(controls, drafter=MODEL, **options):
    sources = ragged_sources(0, 2, WIDTH, VOCAB)
    options = {"eos_id": EOS, "max_length": 8, **options}
    sampling = Sampling(controls=(controls,))
    return speculative_generate(
        TARGET, drafter, *sources, row_keys(0, 2), sampling=sampling, **options
    )


def test_a_drafter_that_gives_no_prefix_is_refused():
    with pytest.raises(InputError, match="read the prefix, and this drafter"):
        decode(BannedTokens(jnp.array([4])), Blind(MODEL))


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (MinLength(0, EOS), "MinLength.length is 0: it must be tokens of a whole"),
        (MinLength(2.5, EOS), "MinLength.length is 2.5: it must be whole numbers"),
        (MinLength(4, 1), "MinLength.eos_id is 1 and rows end at eos_id 2"),
        (MinLength(4, VOCAB), "MinLength.eos_id has the id 10: the target has ids 0"),
        (
            MinLength(jnp.ones(3, int), EOS),
            r"MinLength.length has shape \(3,\): .* per row \(2 rows\)",
        ),
        (BannedTokens(jnp.array([3, 10])), "BannedTokens.ids has the id 10"),
        (BannedTokens(jnp.array([-2])), "BannedTokens.ids is .*-1 for none"),
        (BannedTokens(jnp.zeros((0,), int)), r"BannedTokens.ids has shape \(0,\)"),
        (BannedTokens(jnp.array([2.0])), "BannedTokens.ids .* whole numbers"),
        (BannedSequences(jnp.array([[-1, 3]])), "padded with -1 on the right"),
        (BannedSequences(jnp.array([3, 4])), r"has shape \(2,\): .*\[sequences, ids\]"),
        (RepetitionPenalty(0.0), "RepetitionPenalty.penalty is 0.0: .* above 0"),
        (RepetitionPenalty(float("inf")), "RepetitionPenalty.penalty is inf"),
        (RepetitionPenalty(1.2, -1), "RepetitionPenalty.start is -1"),
        (CountPenalty(float("nan")), "CountPenalty.frequency is nan: .* finite"),
        (NoRepeatNgram(0), "NoRepeatNgram.size is 0: .* at least 1"),
    ],
)
def test_refusals(control, words):
    with pytest.raises(InputError, match=rf"sampling\.controls: .*{words}"):
        decode(control)


def test_the_drafts_own_controls_are_checked_and_others_are_the_targets():
    own = Sampling(controls=(NoRepeatNgram(0),))
    with pytest.raises(InputError, match=r"draft_sampling\.controls: NoRepeatNgram"):
        decode(NoRepeatNgram(2), draft_sampling=own)
    check_sampling(Sampling(controls=(Nothing(),)), "sampling", 2)
