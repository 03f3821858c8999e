"""The target's first layers draft, exactly, and an exit makes of them what it can."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import InputError, Sampling, autoregressive_generate, speculative_generate
from specjax.drafters import files
from specjax.drafters.early_exit import ADAPTERS, EarlyExitDrafter
from specjax.models.base import Encoded
from specjax.models.t5 import T5
from specjax.models.widen import widen, widened_config
from tests.drafters import laws
from tests.drafters.test_conformance import commit_and_draft
from tests.drafters.test_quantized import table_of
from tests.helpers import (
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GREEDY = Sampling(temperature=None)
ROWS, LENGTH, GAMMA = 6, 20, 3
SOURCE = [2, 0, 3]
SLOW = pytest.mark.slow
TINY = dict(
    vocab_size=4,
    d_model=8,
    d_kv=4,
    num_heads=2,
    d_ff=8,
    num_encoder_layers=1,
    num_decoder_layers=2,
)


def shaken(drafter, seed: int, scale: float):
    """The drafter with noise in each of its arrays."""
    generator = np.random.default_rng(seed)

    def noisy(leaf):
        noise = generator.normal(size=leaf.shape) * np.asarray(leaf).std()
        return leaf + jnp.asarray(scale * noise, leaf.dtype)

    return jax.tree.map(noisy, drafter)


def make(target, layers=1, adapter="layer", scale=0.1) -> EarlyExitDrafter:
    settings = {"layers": layers, "adapter": adapter}
    made = EarlyExitDrafter.create(target, settings, jax.random.key(1))
    return shaken(made, 2, scale) if scale else made


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


def decode(target, drafter=None, **options):
    inputs, mask = ragged_sources(0, ROWS, 9)
    options = dict(sampling=GREEDY, max_length=LENGTH, eos_id=-1) | options
    common = (inputs, mask, row_keys(0, ROWS))
    if drafter is None:
        return autoregressive_generate(target, *common, **options)
    return speculative_generate(target, drafter, *common, gamma=GAMMA, **options)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_joint_law(adapter):
    """Both rules write the target's law; a false report of the draft's does not."""
    model = tiny_t5(4, **TINY)
    drafter = make(model, adapter=adapter, scale=0.3)
    table = table_of(model, SOURCE, 3)
    laws.check_joint_law(model, table, drafter, model, 40_000, inputs=SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", ["layer", *(pytest.param(name, marks=SLOW) for name in ADAPTERS[:2])]
)
def test_greedy_text_is_the_targets(target, adapter):
    plain = decode(target)
    fast = decode(target, make(target, adapter=adapter))
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()


@pytest.mark.slow
def test_with_all_layers_it_is_the_target(target):
    """All but the last, and the last as the adapter; one of another place is not."""
    deep = tiny_t5(3, num_decoder_layers=3)
    exact = decode(deep, make(deep, layers=2, scale=0))
    assert (exact.stats.accepted == exact.stats.drafted).all()
    skipping = decode(deep, make(deep, layers=1, scale=0))
    assert (skipping.stats.accepted < skipping.stats.drafted).any()
    np.testing.assert_array_equal(exact.tokens, skipping.tokens)


@struct.dataclass
class Forward(EarlyExitDrafter):
    """A wrong twin: its memory is not rolled back."""

    def commit(self, state, committed):
        after = super().commit(state, committed)
        return after.replace(cache=state.cache)


@pytest.mark.slow
def test_commit_keeps_the_memory_in_step(target):
    drafter = make(target)
    commit_and_draft(drafter, Sampling(), target, 64, atol=1e-5)
    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    with pytest.raises(AssertionError):
        commit_and_draft(Forward(**fields), Sampling(), target, 64, atol=1e-5)


@pytest.mark.slow
def test_rows_stand_alone(target):
    """And are finite where the source is empty."""
    laws.check_rows(target, make(target), atol=1e-5)


@jax.jit
def slot_logits(drafter, target, fed):
    """What training compares, on some sources."""
    inputs, mask = ragged_sources(1, len(fed), 7)
    encoded = target.encode(inputs, mask)
    output, _ = target.decode(fed, None, encoded, taps=drafter.taps)
    key = jax.random.key(0)
    return drafter.slot_logits(
        target, encoded, inputs, mask, fed, output.features, key, gamma=GAMMA
    )


@jax.jit
def teacher_forced(drafter, target, fed):
    inputs, mask = ragged_sources(1, len(fed), 7)
    model = drafter._drafter(target).model
    encoded = model.encode_shared(target.encode(inputs, mask))
    return model.decode(fed, None, encoded)[0].logits


def test_slots_are_what_is_drafted(target):
    """Slot i of anchor t is the law after t + 1 + i tokens."""
    drafter, generator = make(target), np.random.default_rng(0)
    fed = jnp.asarray(generator.integers(2, 64, (3, 7)), jnp.int32).at[:, 0].set(0)
    slots = slot_logits(drafter, target, fed)
    assert slots.logits.shape == (3, 21, 64)
    whole = teacher_forced(drafter, target, fed)
    seen = set()
    logits = np.asarray(slots.logits)
    pairs = zip(slots.anchor[0].tolist(), slots.slot[0].tolist(), strict=True)
    for place, (anchor, slot) in enumerate(pairs):
        if anchor >= 0:
            seen.add((anchor, slot))
            np.testing.assert_allclose(
                logits[:, place], whole[:, anchor + slot], atol=1e-5
            )
    assert seen == {(t, i) for t in range(7) for i in range(3) if t + i < 7}


def widened(small):
    """The same function at another shape."""
    shape = dict(d_model=24, num_heads=5, d_kv=8, d_ff=40, num_decoder_layers=3)
    config = widened_config(small.config, dataclasses.replace(small.config, **shape))
    return widen(small, config, jax.random.key(3))


def check_widened(small, drafter, folder) -> tuple[T5, Any]:
    """Its laws and file hold for its target widened; returns both as they are then."""
    large = widened(small)
    files.save_drafter(drafter, folder, "f" * 64, dtype=jnp.float32)
    loaded = files.load_drafter(type(drafter), folder, large, "f" * 64)
    jax.tree.map(np.testing.assert_array_equal, drafter, loaded)
    assert loaded.settings() == drafter.settings()
    fed = jnp.asarray(np.random.default_rng(0).integers(2, 64, (3, 7)), jnp.int32)
    logits = [slot_logits(drafter, own, fed).logits for own in (small, large)]
    np.testing.assert_allclose(*logits, atol=1e-4)
    return large, loaded


SCALED = {"tied_head": True, "scaled_head": True}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SCALED, pytest.param({}, marks=SLOW)])
def test_laws_for_its_target_widened(changes, tmp_path):
    small = tiny_t5(0, **changes)
    check_widened(small, make(small), tmp_path)


@pytest.mark.slow
def test_it_drafts_for_its_target_widened(target, tmp_path):
    """The same text in the same steps."""
    drafter = make(target)
    large, loaded = check_widened(target, drafter, tmp_path)
    one, two = decode(target, drafter), decode(large, loaded)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    jax.tree.map(np.testing.assert_array_equal, one.stats, two.stats)


def test_a_narrower_target_is_refused(target):
    with pytest.raises(InputError, match="width 16 and the target's width is 8"):
        make(target, scale=0).init(
            tiny_t5(1, d_model=8),
            Encoded(hidden=jnp.zeros((1, 3, 8)), mask=jnp.ones((1, 3), bool)),
            jnp.ones((1, 3), jnp.int32),
            jnp.ones((1, 3), bool),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            9,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "layers is 0: .* has 2 decoder layers, of which 1 to 1"),
        ({"layers": 2}, "layers is 2"),
        ({"layers": True}, "layers is True"),
        ({"adapter": "lora"}, "adapter is 'lora'.*none, feed_forward, layer"),
        ({"depth": 1}, "no setting 'depth'"),
        ({"shape": {"width": 3}}, "no T5Config"),
    ],
)
def test_settings_that_mean_nothing(target, settings, message):
    with pytest.raises(InputError, match=message):
        EarlyExitDrafter.create(target, settings, jax.random.key(0))


def test_a_target_of_one_layer_has_no_exit():
    with pytest.raises(InputError, match="no early exit"):
        make(tiny_t5(0, num_decoder_layers=1))


def test_another_targets_exit_is_refused(target, tmp_path):
    files.save_drafter(make(target), tmp_path, "f" * 64)
    with pytest.raises(InputError, match="made for another target"):
        files.load_drafter(EarlyExitDrafter, tmp_path, target, "0" * 64)


def test_it_holds_no_array_of_the_target(target):
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target)}
    for adapter in ADAPTERS:
        made = make(target, adapter=adapter, scale=0)
        for leaf in jax.tree.leaves(made):
            assert leaf.unsafe_buffer_pointer() not in own
