"""A row's output depends on its own source, prefix, key and budget alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    Sampling,
    autoregressive_generate,
    block_verify,
    speculative_generate,
    token_verify,
)
from tests.helpers import (
    HashModel,
    ScriptDrafter,
    hash_pair,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

ROWS, WIDTH, LENGTH = 6, 8, 20
TARGET, DRAFT = hash_pair()


def decode(
    inputs,
    mask,
    keys,
    target=TARGET,
    draft=DRAFT,
    *,
    sampling=Sampling(temperature=0.5),  # noqa: B008
    budget=LENGTH - 1,
    max_length=LENGTH,
    **options,
):
    options = {"gamma": 3, "eos_id": 2, "verifier": block_verify, **options}
    return speculative_generate(
        target,
        ModelDrafter(draft),
        inputs,
        mask,
        keys,
        sampling=sampling,
        budget=jnp.broadcast_to(jnp.int32(budget), inputs.shape[:1]),
        max_length=max_length,
        **options,
    )


def assert_rows_equal(output, rows, other, others) -> None:
    """The same tokens, and the same counts of everything that was done."""
    width = min(output.tokens.shape[1], other.tokens.shape[1])
    np.testing.assert_array_equal(
        output.tokens[rows, :width], other.tokens[others, :width]
    )
    for one, two in zip(
        jax.tree.leaves(output.stats), jax.tree.leaves(other.stats), strict=True
    ):
        np.testing.assert_array_equal(one[rows], two[others])


@pytest.fixture(scope="module")
def batch():
    return *ragged_sources(1, ROWS, WIDTH), row_keys(5, ROWS)


@pytest.fixture(scope="module")
def output(batch):
    output = decode(*batch)
    assert 0 < output.stats.accepted.sum() < output.stats.drafted.sum()
    return output


def test_alone(batch, output):
    for row in range(ROWS):
        own = slice(row, row + 1)
        alone = decode(*(x[own] for x in batch))
        assert_rows_equal(output, own, alone, slice(None))


def test_permuted(batch, output):
    order = np.random.default_rng(0).permutation(ROWS)
    assert_rows_equal(decode(*(x[order] for x in batch)), slice(None), output, order)


def test_with_other_neighbours(batch, output):
    inputs, mask, keys = batch
    rows = np.array([1, 4])
    others = np.setdiff1d(np.arange(ROWS), rows)
    changed = decode(
        inputs.at[others].set((inputs[others] + 7) % 64),
        mask,
        jnp.where(jnp.isin(jnp.arange(ROWS), rows), keys, row_keys(6, ROWS)),
        budget=jnp.full(ROWS, LENGTH).at[others].set(3),
    )
    assert_rows_equal(changed, rows, output, rows)
    assert not jnp.array_equal(changed.tokens[others], output.tokens[others])


def test_at_another_padding_and_in_a_longer_buffer(batch, output):
    """Wider padding, with anything in it: ids of masked places play no part."""
    inputs, mask, keys = batch
    wide = jnp.pad(inputs, ((0, 0), (0, 5)), constant_values=3)
    wide = jnp.where(jnp.pad(mask, ((0, 0), (0, 5))), wide, 9)
    wide_mask = jnp.pad(mask, ((0, 0), (0, 5)))
    padded = decode(wide, wide_mask, keys, max_length=LENGTH + 9)
    assert_rows_equal(padded, slice(None), output, slice(None))


def test_seeds(batch, output):
    inputs, mask, keys = batch
    again = decode(inputs, mask, row_keys(5, ROWS))
    assert_rows_equal(again, slice(None), output, slice(None))
    other = decode(inputs, mask, row_keys(6, ROWS))
    assert (other.tokens != output.tokens).any(axis=1).all()
    # Some rows with a seed of their own, some from another batch's: no mixing.
    mixed = keys.at[::2].set(row_keys(6, ROWS)[::2])
    half = decode(inputs, mask, mixed)
    assert_rows_equal(half, slice(0, None, 2), other, slice(0, None, 2))
    assert_rows_equal(half, slice(1, None, 2), output, slice(1, None, 2))
    # Equal rows with different keys differ: no noise is shared between rows.
    same = jnp.repeat(inputs[:1], ROWS, 0), jnp.repeat(mask[:1], ROWS, 0)
    assert len(np.unique(decode(*same, keys, eos_id=-1).tokens, axis=0)) == ROWS


def test_padding_rows_and_budgets(batch, output):
    """Budget 0 emits and counts nothing; more than the buffer is the buffer."""
    inputs, mask, keys = batch
    budget = jnp.array([0, 5, 0, 1, 2**31 - 1, LENGTH - 1])
    cut = decode(inputs, mask, keys, budget=budget)
    for row in (0, 2):
        assert not cut.tokens[row].any() and cut.length[row] == 1
        assert all(not leaf[row].any() for leaf in jax.tree.leaves(cut.stats))
    for row in (1, 3, 4, 5):
        length = min(1 + int(budget[row]), int(output.length[row]))
        assert cut.length[row] == length
        np.testing.assert_array_equal(
            cut.tokens[row, :length], output.tokens[row, :length]
        )
        assert not cut.tokens[row, length:].any()
    nobody = decode(inputs, mask, keys, budget=0)
    assert not nobody.tokens.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(nobody.stats))


def test_finished_rows_stay_as_they_are(batch, output):
    """EOS itself is written, then pad; what was emitted is what can be counted."""
    tokens, length = np.asarray(output.tokens), np.asarray(output.length)
    ended = 0
    for row in range(ROWS):
        assert not tokens[row, length[row] :].any()
        text = tokens[row, 1 : length[row]].tolist()
        assert output.stats.emitted[row] == len(text)
        assert 2 not in text[:-1]
        ended += text[-1] == 2
        assert text[-1] == 2 or length[row] == LENGTH
    # Row 0 ends at its first token, the others go on.
    first = int(output.tokens[0, 1])
    early = decode(*batch, eos_id=first)
    assert early.length[0] == 2 and early.tokens[0, 1] == first
    assert early.stats.target_calls[0] == 1 and early.length.max() > 8


def test_length_never_overshoots():
    """The draft is right every time, and the block ends past the budget or buffer."""
    inputs, mask = ragged_sources(1, ROWS, WIDTH)
    plain = autoregressive_generate(
        TARGET,
        inputs,
        mask,
        row_keys(0, ROWS),
        sampling=Sampling(temperature=None),
        max_length=LENGTH,
        eos_id=-1,
    )
    full = jnp.full((ROWS, LENGTH), 3)
    drafter = ScriptDrafter(truth=plain.tokens, right=full, length=full)
    for budget in range(1, 8):
        output = speculative_generate(
            TARGET,
            drafter,
            inputs,
            mask,
            row_keys(0, ROWS),
            sampling=Sampling(temperature=None),
            gamma=3,
            max_length=LENGTH,
            budget=budget,
            eos_id=-1,
        )
        assert (output.length == 1 + budget).all()
        assert (output.stats.target_calls == -(-budget // 4)).all()
        assert (output.stats.emitted == budget).all()
        np.testing.assert_array_equal(
            output.tokens[:, : budget + 1], plain.tokens[:, : budget + 1]
        )


def test_draft_that_is_the_target_is_always_right():
    """64 tokens, greedy and sampled rows; the budget ends inside a block."""
    inputs, mask = ragged_sources(1, ROWS, WIDTH)
    output = decode(
        inputs,
        mask,
        row_keys(1, ROWS),
        draft=HashModel(TARGET.table),
        sampling=Sampling(temperature=jnp.array([0.0, 0.0, 0.5, 1.0, 2.0, 5.0])),
        verifier=token_verify,
        budget=64,
        max_length=65,
        gamma=5,
        eos_id=-1,
    )
    assert (output.stats.accepted == output.stats.drafted).all()
    assert (output.stats.target_calls == 11).all()  # ceil(64 / 6)
    assert (output.stats.emitted == 64).all()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [token_verify, block_verify])
def test_t5_rows(verifier):
    """T5's logits differ by rounding between shapes; tokens do not under these keys."""
    target = tiny_t5(0)
    draft = perturbed(target, 1, 0.1)
    inputs, mask = ragged_sources(1, ROWS, WIDTH)
    keys = row_keys(5, ROWS)

    def run(*batch, **options):
        return decode(*batch, target, draft, verifier=verifier, **options)

    output = run(inputs, mask, keys)
    assert 0 < output.stats.accepted.sum() < output.stats.drafted.sum()
    for row in range(3):
        own = slice(row, row + 1)
        alone = run(inputs[own], mask[own], keys[own])
        assert_rows_equal(output, own, alone, slice(None))
    wide = jnp.pad(inputs, ((0, 0), (0, 7)), constant_values=5)
    padded = run(wide, jnp.pad(mask, ((0, 0), (0, 7))), keys)
    assert_rows_equal(padded, slice(None), output, slice(None))
    longer = run(inputs, mask, keys, max_length=LENGTH + 9)
    assert_rows_equal(longer, slice(None), output, slice(None))
    same = decode(inputs, mask, keys, target, target, verifier=verifier, eos_id=-1)
    assert same.stats.drafted.sum() - same.stats.accepted.sum() == 0
