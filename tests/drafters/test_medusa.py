"""Heads on the target's hidden state: which state, which law, and the target's text."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    Sampling,
    Verifier,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters import files
from specjax.drafters.base import Committed
from specjax.drafters.medusa import MedusaDrafter
from specjax.errors import InputError
from specjax.models.widen import widen
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, joint_law
from specjax.types import Law, Noise
from tests.helpers import (
    TINY_T5,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)
from tests.twins import right_rule

GAMMA, ROWS, VOCAB, TOKENS = 3, 20_000, 4, 4


def make(target, seed: int = 1, cls=MedusaDrafter, **settings) -> MedusaDrafter:
    """One whose heads say different things."""
    settings = {"heads": GAMMA} | settings
    drafter = cls.create(target, settings, jax.random.key(0))
    heads = jax.random.normal(jax.random.key(seed), drafter.heads.shape)
    return drafter.replace(heads=heads * drafter.heads.shape[-1] ** -0.5)


def teacher_forced(target, drafter, rows: int = 4, length: int = 10):
    """Texts, and what the target says of them; the last source is empty."""
    inputs, mask = ragged_sources(0, rows, 6)
    mask = mask.at[-1].set(False)
    text = jax.random.randint(jax.random.key(3), (rows, length), 2, target.vocab_size)
    text = text.at[:, 0].set(0)
    encoded, output = say(target, inputs, mask, text, drafter.taps)
    return (encoded, inputs, mask, text), output


@functools.partial(jax.jit, static_argnames="taps")
def say(target, inputs, mask, text, taps=()):
    encoded = target.encode(inputs, mask)
    return encoded, target.decode(text, None, encoded, taps=taps)[0]


def by_anchor(drafter, target, sources, output, gamma=GAMMA) -> np.ndarray:
    """Slot logits ``[B, T, G, V]``; zeros at the first anchor, which has none."""
    slots = jax.jit(MedusaDrafter.slot_logits, static_argnames="gamma")(
        drafter, target, *sources, output.features, jax.random.key(0), gamma=gamma
    )
    found = np.zeros((*output.logits.shape[:2], gamma, target.vocab_size), np.float32)
    rows = np.arange(len(found))[:, None]
    found[rows, slots.anchor, slots.slot] = slots.logits
    assert slots.anchor.min() == 1
    return found


SHAPES = {"own head": {}, "tied and scaled": {"tied_head": True, "scaled_head": True}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 16])
def test_untrained_heads_say_what_the_targets_own_says(shape, rank):
    target = tiny_t5(0, **SHAPES[shape])
    # A projection of full rank is the target's.
    drafter = MedusaDrafter.create(
        target, {"heads": GAMMA, "rank": rank}, jax.random.key(0)
    )
    sources, output = teacher_forced(target, drafter)
    found = by_anchor(drafter, target, sources, output)
    for slot in range(GAMMA):
        np.testing.assert_allclose(
            found[:, 1:, slot], output.logits[:, :-1], rtol=1e-3, atol=1e-3
        )


def test_a_low_rank_is_the_nearest():
    target = tiny_t5(0)
    drafter = MedusaDrafter.create(target, {"rank": 4}, jax.random.key(0))
    assert drafter.up.shape == (64, 4) and drafter.down.shape == (4, 16)
    head = np.asarray(target.head[...])
    left, sizes, right = np.linalg.svd(head)
    nearest = (left[:, :4] * sizes[:4]) @ right[:4]
    np.testing.assert_allclose(drafter.up @ drafter.down, nearest, atol=1e-4)


def test_a_block_is_that_of_the_last_verified_token():
    target = tiny_t5(0)
    drafter = make(target, slots="sampled")
    sources, output = teacher_forced(target, drafter)
    text = sources[-1]
    rows, size = text.shape
    before, accepted = jnp.array([2, 3, 4, 5]), jnp.array([3, 0, 1, 2])
    length = before + accepted + 1
    # The target was fed the last committed token and the drafted ones.
    places = before[:, None] - 1 + jnp.arange(GAMMA + 1)[None]
    fed = jnp.take_along_axis(output.features[0], places[..., None], axis=1)
    prefix, start = text[:, :1], jnp.ones(rows, jnp.int32)
    empty = drafter.init(target, *sources[:3], prefix, start, size)
    noise = Noise(keys=row_keys(0, rows), start=length - 1)

    @jax.jit
    def draft(state):
        block, _ = drafter.draft(
            target, noise, state, text, length, gamma=GAMMA, sampling=Sampling()
        )
        return block

    assert draft(empty).length.tolist() == [0] * rows
    committed = Committed(text, length, accepted, (fed,))
    block = draft(drafter.commit(empty, committed))
    assert block.length.tolist() == [GAMMA] * rows
    found = by_anchor(drafter, target, sources, output)
    laws = np.asarray(jax.nn.softmax(found, axis=-1))
    np.testing.assert_allclose(block.law.probs.sum(-1), 1, atol=1e-5)
    rows = np.arange(rows)
    np.testing.assert_allclose(block.law.probs, laws[rows, length - 1], atol=1e-5)
    # Neither the last committed token's state, which nobody has, nor an older one's.
    for off in (0, -2):
        gap = np.abs(laws[rows, length + off] - block.law.probs)
        assert gap.max(axis=(1, 2)).min() > 1e-3


@struct.dataclass
class Lying(MedusaDrafter):
    """A wrong twin: what it chooses it calls drawn; and it draws by another's law.

    To call certain what was drawn would be no fault: whatever the draft is, it stands
    with the target's probability of it then.
    """

    def draft(self, *arguments, **options):
        block, state = self._truly(*arguments, **options)
        if self.slots == "sampled":
            law = Law(probs=jnp.flip(block.law.probs, axis=1))
        else:
            other, _ = self.replace(slots="sampled")._truly(*arguments, **options)
            law = other.law
        return block.replace(law=law), state

    _truly = MedusaDrafter.draft


def small_target():
    """A T5 of four ids, and the table of its laws for the source [2, 0, 3]."""
    shape = dict(vocab_size=VOCAB, d_model=8, d_kv=4, num_heads=2, d_ff=8)
    target = tiny_t5(4, **shape, num_encoder_layers=1, num_decoder_layers=1)
    depth = TOKENS - 1
    texts = np.array(list(itertools.product(range(VOCAB), repeat=depth)), np.int32)
    source = jnp.broadcast_to(jnp.array([[2, 0, 3]]), (len(texts), 3))
    fed = jnp.asarray(np.pad(texts, ((0, 0), (1, 0))))
    _, output = say(target, source, jnp.ones(source.shape, bool), fed)
    laws = jax.nn.softmax(output.logits, axis=-1)
    rows = [np.asarray(laws[:: VOCAB ** (depth - d), d]) for d in range(depth + 1)]
    return target, as_table(np.concatenate(rows), depth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "twin"),
    [
        ("argmax", False),
        pytest.param("sampled", False, marks=pytest.mark.slow),
        pytest.param("argmax", True, marks=pytest.mark.slow),
        pytest.param("sampled", True, marks=pytest.mark.slow),
    ],
)
def test_the_output_has_the_targets_law(slots, twin):
    target, table = small_target()
    drafter = make(target, cls=Lying if twin else MedusaDrafter, slots=slots)
    assert drafter.samples == (slots == "sampled")
    inputs = jnp.broadcast_to(jnp.array([[2, 0, 3]]), (ROWS, 3))
    for number in range(2):
        output = speculative_generate(
            target,
            drafter,
            inputs,
            jnp.ones(inputs.shape, bool),
            row_keys(number, ROWS),
            verifier=Verifier(right_rule, params=jnp.int32(number)),
            sampling=Sampling(),
            gamma=GAMMA,
            max_length=TOKENS + 1,
            eos_id=-1,
        )
        value = chi_square_p(np.asarray(output.tokens)[:, 1:], joint_law(table, TOKENS))
        assert (value < 1e-6) if twin else (value > 1e-3)
        # The first block is empty.
        assert output.stats.target_calls.min() >= 2
        accepted = output.stats.accepted.sum() / output.stats.drafted.sum()
        assert twin or 0.05 < accepted < 0.95


def decode(target, drafter, inputs, mask, keys, sampling=None):
    options = dict(
        sampling=sampling or Sampling(temperature=None), max_length=20, eos_id=1
    )
    if drafter is None:
        return autoregressive_generate(target, inputs, mask, keys, **options)
    return speculative_generate(
        target, drafter, inputs, mask, keys, gamma=GAMMA, **options
    )


@pytest.mark.slow
def test_greedy_text_is_the_targets():
    target = tiny_t5(0)
    inputs, mask = ragged_sources(0, 8, 6)
    drafter = MedusaDrafter.create(target, {"heads": GAMMA}, jax.random.key(0))
    plain = decode(target, None, inputs, mask, row_keys(0, 8))
    fast = decode(target, drafter, inputs, mask, row_keys(0, 8))
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()


@pytest.mark.slow
def test_rows_are_independent():
    target, order = tiny_t5(0), jnp.array([5, 2, 2, 0, 7, 1, 4, 6])
    inputs, mask = ragged_sources(0, 8, 6)
    drafter, keys = make(target, slots="sampled"), row_keys(0, 8)
    whole = decode(target, drafter, inputs, mask, keys, Sampling())
    other = decode(target, drafter, inputs[order], mask[order], keys[order], Sampling())
    np.testing.assert_array_equal(whole.tokens[order], other.tokens)
    assert 0 < whole.stats.accepted.sum() < whole.stats.drafted.sum()


@pytest.mark.slow
def test_a_widened_target_is_drafted_for_as_before(tmp_path):
    """From the file: what is read of it is as wide as what it was trained on."""
    for shape in SHAPES.values():
        target = tiny_t5(0, **shape)
        config = dataclasses.replace(
            TINY_T5,
            **shape,
            d_model=24,
            d_ff=48,
            num_decoder_layers=3,
            eps=TINY_T5.eps * 16 / 24,
        )
        wide = widen(target, config, jax.random.key(1))
        made = MedusaDrafter.create(target, {"heads": GAMMA}, jax.random.key(0))
        files.save_drafter(made, tmp_path, "0" * 64, dtype=jnp.float32)
        inputs, mask = ragged_sources(0, 8, 6)
        keys, found = row_keys(0, 8), []
        for model in (target, wide):
            read = files.load_drafter(MedusaDrafter, tmp_path, model, "0" * 64)
            assert read.settings() == made.settings()
            found.append(decode(model, read, inputs, mask, keys))
        np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
        np.testing.assert_array_equal(found[0].stats.accepted, found[1].stats.accepted)
        assert found[0].stats.accepted.sum() > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "medusa's heads is 0: 1 or more"),
        ({"heads": 2.5}, "medusa's heads is 2.5: 1 or more"),
        ({"rank": 17}, "medusa's rank is 17: 0 to 16"),
        ({"tap": 2}, "medusa's tap is 2: 0 to 1"),
        ({"width": 17}, "medusa's width is 17: 1 to 16"),
        ({"slots": "best"}, "slots is 'best': it must be one of argmax, sampled"),
        ({"depth": 1}, "no setting 'depth': it has heads, rank"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        MedusaDrafter.create(tiny_t5(0), settings, jax.random.key(0))


def test_more_tokens_than_heads_are_refused():
    target = tiny_t5(0)
    drafter = MedusaDrafter.create(target, {"heads": 2}, jax.random.key(0))
    inputs, mask = ragged_sources(0, 2, 6)
    with pytest.raises(InputError, match="gamma is 3 and the medusa drafter has 2"):
        decode(target, drafter, inputs, mask, row_keys(0, 2))
    sources, output = teacher_forced(target, drafter)
    with pytest.raises(InputError, match="trained on blocks of one token per head"):
        by_anchor(drafter, target, sources, output, gamma=1)
    with pytest.raises(InputError, match="draft_sampling is set and MedusaDrafter"):
        speculative_generate(
            target,
            drafter,
            inputs,
            mask,
            row_keys(0, 2),
            draft_sampling=Sampling(),
            gamma=2,
            max_length=9,
        )
