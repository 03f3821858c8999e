"""A head that is cut: its law is the one drawn from, and the target's text stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    InputError,
    ModelDrafter,
    Sampling,
    TreeDrafter,
    autoregressive_generate,
    speculative_generate,
)
from specjax.data.tokenizer import ByteTokenizer
from specjax.drafters.trimmed import (
    always_kept,
    frequent_tokens,
    head_bytes,
    low_rank_head,
    trim_head,
)
from specjax.proof.tables import table_model
from tests.drafters import laws
from tests.drafters.test_conformance import commit_and_draft
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GREEDY = Sampling(temperature=None)
# A draft of six ids for a target of four: the last two are padding of its vocabulary.
SMALL = dict(
    vocab_size=6,
    d_model=8,
    d_kv=4,
    num_heads=2,
    d_ff=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
KEPT = np.r_[1, 3:40:2, 40:60]  # of a vocabulary of 64


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target, 1, 0.02)


def cut(model, kind: str):
    kept = [5, 0, 3, 2] if model.vocab_size < 10 else KEPT
    rank = model.config.d_model - 3
    return trim_head(model, kept) if kind == "kept" else low_rank_head(model, rank)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kept", "rank"])
def test_joint_law(kind):
    """Exact by both rules; a twin that reports the law before the cut is not."""
    table, model = table_model(0, 4, 3, zeros=0.2), tiny_t5(3, **SMALL)
    drafter = ModelDrafter(cut(model, kind))
    laws.check_joint_law(table, table, drafter, model, 60_000)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits(target, tied):
    """Those of the kept ids are the model's; of a rank, no head is nearer."""
    model = tiny_t5(1, tied_head=True, scaled_head=True) if tied else target
    inputs, mask = ragged_sources(0, 3, 5)

    @jax.jit
    def logits(model):
        return model.decode(inputs, None, model.encode(inputs, mask))[0].logits

    whole, trimmed = logits(model), logits(trim_head(model, KEPT))
    np.testing.assert_allclose(trimmed[..., KEPT], whole[..., KEPT], atol=1e-5)
    dropped = np.delete(np.arange(64), KEPT)
    law = Sampling().law(trimmed).probs
    assert (law[..., dropped] == 0).all() and (law[..., KEPT] > 0).all()
    errors = [
        float(jnp.abs(logits(low_rank_head(model, rank)) - whole).mean())
        for rank in (4, 12, 15)
    ]
    assert errors == sorted(errors, reverse=True)
    # No matrix of the rank is nearer.
    head = np.asarray((model.embedding if tied else model.head)[...], np.float64)
    low = low_rank_head(model, 4).head[...]
    left = np.linalg.svd(head, compute_uv=False)[4:]
    distance = np.linalg.norm(head - np.float64(low.up) @ np.float64(low.down))
    np.testing.assert_allclose(distance, np.linalg.norm(left), rtol=1e-5)
    assert model.head is None if tied else model.head[...].shape == (64, 16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kept", "rank"])
@pytest.mark.parametrize("tree", [False, True])
def test_greedy_text_is_the_targets(target, draft, kind, tree):
    inputs, mask = ragged_sources(0, 6, 9)
    arguments = (inputs, mask, row_keys(0, 6))
    options = dict(sampling=GREEDY, max_length=16, eos_id=-1)
    plain = autoregressive_generate(target, *arguments, **options)
    model = cut(draft, kind)
    drafter = TreeDrafter(model, (-1, 0, 0, 1)) if tree else ModelDrafter(model)
    fast = speculative_generate(target, drafter, *arguments, gamma=3, **options)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
    if kind == "kept":  # what the draft cannot say, the target says all the same
        assert not np.isin(fast.tokens[:, 1:], KEPT).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kept", "rank"])
def test_commit_keeps_the_memory_in_step(target, draft, kind):
    commit_and_draft(ModelDrafter(cut(draft, kind)), GREEDY, target, 64, atol=1e-5)


@pytest.mark.slow
def test_rows_stand_alone(target, draft):
    laws.check_rows(target, ModelDrafter(cut(draft, "kept")), atol=1e-6)


@struct.dataclass
class Bans:
    """A control that bans some ids."""

    ids: jax.Array

    def __call__(self, logits, tokens, length):
        return logits.at[self.ids].set(-jnp.inf)


@pytest.mark.slow
def test_a_control_that_bans_all_that_is_kept_leaves_a_law(target, draft):
    drafter = ModelDrafter(cut(draft, "kept"))
    inputs, mask = ragged_sources(0, 4, 5)
    output = speculative_generate(
        target,
        drafter,
        inputs,
        mask,
        row_keys(0, 4),
        sampling=Sampling(controls=(Bans(jnp.asarray(KEPT)),)),
        gamma=2,
        max_length=10,
        eos_id=-1,
        trace=True,
    )
    assert not np.isin(output.tokens[:, 1:], KEPT).any()
    drafted = np.asarray(output.trace.q)[np.asarray(output.trace.length) > 0]
    assert (drafted > 0).all() and np.isfinite(drafted).all()


def test_bytes_of_the_head(target):
    assert head_bytes(target) == 64 * 16 * 4
    assert head_bytes(trim_head(target, KEPT)) == len(KEPT) * 16 * 4 + 4 * 64
    assert head_bytes(low_rank_head(target, 5)) == 5 * (64 + 16) * 4
    tied = tiny_t5(0, tied_head=True)
    assert head_bytes(tied) == 64 * 16 * 4
    assert head_bytes(trim_head(tied, [1, 2])) == 2 * 16 * 4 + 4 * 64


def test_what_means_nothing_is_refused(target):
    for kept, message in (
        ([], "no id is kept"),
        ([1, 64], "id 64 is kept: the draft has ids 0 to 63"),
        ([-1, 3], "id -1 is kept"),
        ([3, 4, 3], "id 3 is kept twice"),
    ):
        with pytest.raises(InputError, match=message):
            trim_head(target, kept)
    for rank in (0, 16, True):
        with pytest.raises(InputError, match="from 1 to 15"):
            low_rank_head(target, rank)
    with pytest.raises(InputError, match="cut already"):
        low_rank_head(trim_head(target, [1, 2]), 3)


def test_frequent_tokens():
    rows = [[5, 6, 6, 7], [7, 7, 9], []]
    np.testing.assert_array_equal(frequent_tokens(rows, (1, 8), 4, 12), [1, 6, 7, 8])
    # Equals by their number; what never came, from the lowest on.
    np.testing.assert_array_equal(
        frequent_tokens(rows, (1,), 7, 12), [0, 1, 2, 5, 6, 7, 9]
    )
    for arguments, message in (
        (((1, 8, 2), 2, 12), "2 ids are to be kept: from 3"),
        (((1,), 12, 12), "from 1 .* to 11"),
        (((12,), 4, 12), "id 12 is"),
        (((1,), 4, 9), "id 9 is"),
    ):
        with pytest.raises(InputError, match=message):
            frequent_tokens(rows, *arguments)


def test_always_kept():
    pieces = ["<pad>", "</s>", "<unk>", "▁the", "▁", "7", "▁2016", ",", "▁(", "a1"]
    pieces += ["é", "<0x41>", "<0x2E>", "<0xE2>", "<extra_id_3>", "▁<extra_id_0>"]
    assert always_kept(pieces, 1) == (1, 4, 5, 6, 7, 8, 12, 14, 15)
    tokenizer = ByteTokenizer(num_sentinels=2)
    spelt = [tokenizer.piece(index) for index in range(tokenizer.vocab_size)]
    kept = set(always_kept(spelt, tokenizer.eos_id))
    assert {tokenizer.eos_id, 259, 260, *(b + 3 for b in b"09 .,\n")} <= kept
    assert not kept & {b + 3 for b in b"azAZ"} and tokenizer.pad_id not in kept
