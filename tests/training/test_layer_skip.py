"""Layers that are left out do and learn nothing, and exits are trained."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax import errors
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.models import t5
from specjax.training import init, layer_skip, losses, slots, step
from tests.training.test_step import CONFIG, OPTIMIZER, copy_batch

DEEP = dataclasses.replace(CONFIG, num_decoder_layers=3)
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def model() -> t5.T5:
    return init.mimetic_init(t5.T5(DEEP, jax.random.key(0)))


def outputs(model, batch):
    """Of each decoder layer."""
    return step.forced_output(model, batch, taps=(0, 1, 2)).features


def test_a_layer_that_is_left_out_is_the_identity(model):
    batch, counts, draws = copy_batch(0), np.zeros(3), 400
    before = np.asarray(model.decoder[0].cross.out[...])
    out = jax.jit(lambda key: layer_skip.drop_layers(model, 0.6, key))
    for number in range(draws):
        dropped = out(jax.random.key(number))
        gone = [not block.cross.out[...].any() for block in dropped.decoder]
        for block, left_out in zip(dropped.decoder, gone, strict=True):
            parts = (block.attention.out, block.feed_forward.wo)
            assert all((not part[...].any()) == left_out for part in parts)
        counts += gone
        if gone == [False, True, False]:
            some = dropped
    # 0.6 times 2**(l / 2) - 1.
    expected = 0.6 * np.array([0, 2**0.5 - 1, 1])
    np.testing.assert_allclose(counts / draws, expected, atol=0.08)
    np.testing.assert_array_equal(before, model.decoder[0].cross.out[...])
    first, second, last = outputs(some, batch)
    np.testing.assert_array_equal(first, second)
    whole = outputs(model, batch)
    np.testing.assert_array_equal(first, whole[0])
    assert np.abs(last - whole[2]).max() > 1e-3


@functools.partial(jax.jit, static_argnames="skip")
def gradients(model, key, skip=None):
    return step.mean_gradients(model, copy_batch(0), key, skip=skip)


def test_a_layer_that_is_left_out_learns_nothing(model):
    seen = set()
    for key in range(12):
        skip = layer_skip.LayerSkip(layer_dropout=0.6)
        grads, _ = gradients(model, jax.random.key(key), skip)
        moved = [
            any(bool(leaf.any()) for leaf in jax.tree.leaves(block))
            for block in grads.decoder
        ]
        assert moved[0]
        seen.add(tuple(moved[1:]))
    assert {(True, True), (True, False)} <= seen


@pytest.mark.slow
def test_the_loss_at_an_exit(model):
    """One earlier layer's, through the same norm and head, in proportion to depth."""
    batch = copy_batch(0)
    features = outputs(model, batch)[:2]
    at = [
        float(losses.token_loss(logits, batch.targets, batch.targets_mask).loss / 256)
        for logits in (model.logits(model.decoder_norm(own)) for own in features)
    ]
    plain = float(gradients(model, jax.random.key(0))[1]["loss"])
    found = []
    for key in range(60):
        skip = layer_skip.LayerSkip(exit_loss=0.3)
        _, shares = gradients(model, jax.random.key(key), skip)
        own = float(shares["exit_loss"])
        found.append(int(abs(own - at[1]) < 1e-3))
        assert min(abs(own - other) for other in at) < 1e-3
        np.testing.assert_allclose(shares["loss"], plain + 0.3 * own, rtol=1e-4)
    assert 0.5 < np.mean(found) < 0.83  # two in three


@pytest.mark.slow
def test_a_target_so_trained_drafts_better_by_itself():
    """Its first layer's exit, untrained, beside that of a target trained plainly."""
    config = dataclasses.replace(OPTIMIZER, steps=250, decay_steps=200)
    alphas, accuracy = [], []
    for skip in (None, layer_skip.LayerSkip(layer_dropout=0.1, exit_loss=0.5)):
        model = init.mimetic_init(t5.T5(DEEP, jax.random.key(0)))
        state = step.init_state(model, config, jax.random.key(1))
        for number in range(250):
            state, _ = step.train_step(
                state, copy_batch(number), config=config, skip=skip
            )
        held_out = copy_batch(1000)
        settings = {"layers": 1, "adapter": "none"}
        drafter = EarlyExitDrafter.create(state.model, settings, jax.random.key(0))
        scores = slots.slot_eval_step(
            drafter,
            state.model,
            held_out,
            jax.random.key(0),
            how=slots.Objective(),
            gamma=2,
        )
        alphas.append(float(scores.means()["acceptance"][0]))
        sums = step.eval_step(state.model, held_out)
        accuracy.append(float(sums.correct / sums.tokens))
    assert min(accuracy) > 0.8, accuracy
    assert alphas[1] > alphas[0] + 0.1, (alphas, accuracy)


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        ({"layer_dropout": 1.0}, 3, "layer_dropout is 1.0"),
        ({"layer_dropout": -0.1}, 3, "layer_dropout is -0.1"),
        ({"exit_loss": float("inf")}, 3, "exit_loss is inf"),
        ({"exit_loss": -1.0}, 3, "exit_loss is -1.0"),
        ({"exit_loss": 1.0}, 1, "has 1 decoder layer: it needs 2"),
    ],
)
def test_settings_that_mean_nothing(settings, layers, message):
    how = layer_skip.LayerSkip(**settings)
    with pytest.raises(errors.InputError, match=message):
        layer_skip.check_layer_skip(how, layers, "config")


def test_it_is_not_given_together_with_a_target_to_distil(model):
    with pytest.raises(errors.InputError, match="give one of them"):
        step.mean_gradients(
            model,
            copy_batch(0),
            jax.random.key(0),
            target=model,
            divergence=step.distill.Divergence(),
            skip=layer_skip.LayerSkip(0.1),
        )
