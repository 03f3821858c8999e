"""One layer over the target's features: exact, in step, and trained as it drafts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import InputError, Sampling
from specjax.drafters import files
from specjax.drafters.eagle import EagleDrafter
from specjax.training import optimizer, slots, step
from specjax.types import Noise
from tests.drafters import laws
from tests.drafters.test_conformance import commit_and_draft
from tests.drafters.test_early_exit import (
    SCALED,
    SLOW,
    TINY,
    check_widened,
    decode,
    slot_logits,
)
from tests.drafters.test_quantized import table_of
from tests.helpers import (
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

SOURCE, GAMMA = [2, 0, 3], 3


def make(target, seed: int = 1, **settings) -> EagleDrafter:
    return EagleDrafter.create(target, settings, jax.random.key(seed))


def as_twin(kind, drafter):
    """The same weights in another class."""
    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    return kind(**fields)


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


@pytest.mark.slow
def test_joint_law():
    """Both rules write the target's law; a false report of the draft's does not."""
    model = tiny_t5(4, **TINY)
    table = table_of(model, SOURCE, 3)
    laws.check_joint_law(model, table, make(model), model, 40_000, inputs=SOURCE)


@pytest.fixture(scope="module")
def plain(target):
    return decode(target)


@pytest.fixture(scope="module")
def trained(target, plain):
    """A drafter that has seen the target's own texts for some steps."""
    inputs, mask = ragged_sources(0, 6, 9)
    texts = plain.tokens[:, 1:]
    batch = step.Batch(inputs, mask, texts, jnp.ones(texts.shape, bool))
    config = optimizer.OptimizerConfig(learning_rate=1e-2, warmup_steps=1, steps=100)
    state = step.init_state(make(target), config, jax.random.key(0))
    expected = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(40):
            state, metrics = slots.slot_step(
                state, target, batch, config=config, how=slots.Objective(), gamma=GAMMA
            )
            expected.append(float(metrics["expected_length"]))
    assert expected[-1] > expected[0] + 0.2, expected
    return state.model


@pytest.mark.slow
def test_greedy_text_is_the_targets(target, plain, trained):
    fast = decode(target, trained)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    accepted, drafted = fast.stats.accepted.sum(), fast.stats.drafted.sum()
    assert 0.2 < accepted / drafted < 1
    fresh = decode(target, make(target))
    np.testing.assert_array_equal(fresh.tokens, plain.tokens)
    assert fresh.stats.accepted.sum() / fresh.stats.drafted.sum() < accepted / drafted


@struct.dataclass
class Unheard(EagleDrafter):
    """A wrong twin: it goes on from its own outputs, whatever the target has said."""

    def commit(self, state, committed):
        return state


@pytest.mark.slow
def test_commit_keeps_the_memory_in_step(target):
    drafter = make(target)
    commit_and_draft(drafter, Sampling(), target, 64, atol=1e-5)
    with pytest.raises(AssertionError):
        twin = as_twin(Unheard, drafter)
        commit_and_draft(twin, Sampling(), target, 64, atol=1e-5)


@pytest.mark.slow
def test_rows_stand_alone(target):
    """And are finite where the source is empty."""
    laws.check_rows(target, make(target), atol=1e-5)


def test_slots_are_what_is_drafted(target):
    """Training's laws at every anchor and slot are those of a draft from there."""
    drafter, rows, size = make(target), 4, 12
    inputs, mask = ragged_sources(1, rows, 7)
    length = jnp.array([1, 3, 2, 5])
    generator = np.random.default_rng(0)
    tokens = jnp.asarray(generator.integers(2, 64, (rows, size)), jnp.int32)
    tokens = tokens.at[:, 0].set(0)

    @jax.jit
    def draft(drafter, tokens):
        encoded = target.encode(inputs, mask)
        state = drafter.init(target, encoded, inputs, mask, tokens[:, :5], length, size)
        noise = Noise(keys=row_keys(0, rows), start=length - 1)
        block, _ = drafter.draft(
            target, noise, state, tokens, length, gamma=GAMMA, sampling=Sampling()
        )
        return block

    block = draft(drafter, tokens)
    places = length[:, None] + jnp.arange(GAMMA)[None]
    text = tokens.at[jnp.arange(rows)[:, None], places].set(block.tokens)
    given = slot_logits(drafter, target, text[:, :9])
    probs = np.asarray(jax.nn.softmax(given.logits))
    drafted = np.asarray(block.law.dense(64))
    pairs = list(zip(given.anchor[0].tolist(), given.slot[0].tolist(), strict=True))
    for row, count in enumerate(length.tolist()):
        for slot in range(GAMMA):
            own = probs[row, pairs.index((count - 1, slot))]
            np.testing.assert_allclose(own, drafted[row, slot], atol=1e-5)
    # A slot goes on from the layer's own output: the target's features would not do.
    later, first = probs[:, pairs.index((1, 1))], probs[:, pairs.index((2, 0))]
    assert np.abs(later - first).max() > 1e-3
    assert set(pairs) - {(-1, i) for i in range(3)} == {
        (t, i) for t in range(9) for i in range(3) if t + i < 9
    }


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taps": []}, r"taps is \[\]: rising numbers.*0 to 1"),
        ({"taps": [1, 0]}, r"taps is \[1, 0\]"),
        ({"taps": [0, 2]}, "0 to 1"),
        ({"taps": [-1]}, "0 to 1"),
        ({"taps": "0"}, "rising numbers"),
        ({"layers": 1}, "no setting 'layers'"),
        ({"shape": {"width": 3}}, "no T5Config"),
    ],
)
def test_settings_that_mean_nothing(target, settings, message):
    with pytest.raises(InputError, match=message):
        make(target, **settings)


def test_taps_are_a_choice(target):
    assert make(target).taps == (0, 1)
    one = make(target, taps=[1])
    assert one.taps == (1,) and one.fuse.shape == (16, 16)
    files_settings = one.settings()
    again = EagleDrafter.create(target, files_settings, jax.random.key(0))
    assert again.taps == (1,) and again.config == target.config


def test_another_targets_layer_is_refused(target, tmp_path):
    files.save_drafter(make(target), tmp_path, "f" * 64)
    with pytest.raises(InputError, match="made for another target"):
        files.load_drafter(EagleDrafter, tmp_path, target, "0" * 64)


def test_it_holds_no_array_of_the_target(target):
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target)}
    for leaf in jax.tree.leaves(make(target)):
        assert leaf.unsafe_buffer_pointer() not in own
