"""Slots by hand: the row that judges each, the weights, the lengths; and a step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.drafters.base import SlotLogits
from specjax.drafters.medusa import MedusaDrafter
from specjax.training import distill, optimizer, slots, step
from tests.helpers import ragged_sources, tiny_t5

slot_loss = jax.jit(slots.slot_loss, static_argnames=("how", "gamma"))

TV = distill.Divergence("total_variation")
TEXT = jnp.array([[0, 1]])
TARGET = [[0.5, 0.5], [0.25, 0.75]]
# Anchor, slot, law. The last two have no row: past the end, and padding.
DRAFT = [
    (0, 1, [0.75, 0.25]),  # row 1: accepted with 0.25 + 0.25
    (1, 0, [0.5, 0.5]),  # row 1: 0.25 + 0.5
    (0, 0, [0.5, 0.5]),  # row 0: 1
    (1, 1, [0.9, 0.1]),
    (-1, 0, [0.9, 0.1]),
]


def score(how, draft=DRAFT, text=TEXT, target=TARGET, real=None, gamma=2):
    mask = jnp.arange(text.shape[1])[None] < (real or text.shape[1])
    block = SlotLogits(
        logits=jnp.log(jnp.array([[law for _, _, law in draft]], jnp.float32)) + 2.0,
        anchor=jnp.array([[anchor for anchor, _, _ in draft]]),
        slot=jnp.array([[slot for _, slot, _ in draft]]),
    )
    logits = jnp.log(jnp.array([target], jnp.float32)) - 1.0
    return slot_loss(block, logits, text, mask, how, gamma=gamma)


def test_acceptance_and_lengths_by_hand():
    got = score(slots.Objective(TV))
    np.testing.assert_allclose(got.acceptance, [1.75, 0.5], rtol=1e-5)
    np.testing.assert_allclose(got.survival, [1.75, 0.5], rtol=1e-5)
    np.testing.assert_array_equal(got.agreement, [1, 0])
    np.testing.assert_array_equal(got.kept, [2, 1])
    np.testing.assert_array_equal(got.room, [2, 1])
    means = got.means()
    # Anchor 0: 1 + 1 * 0.5; anchor 1: 0.75.
    assert means["expected_length"] == pytest.approx((1.5 + 0.75) / 2, rel=1e-5)
    assert means["expected_length_greedy"] == 0.5
    np.testing.assert_allclose(means["acceptance"], [0.875, 0.5], rtol=1e-5)


# Total variation is 0, 0.5 and 0.25 at slots (0, 0), (0, 1) and (1, 0).
BY_HAND = {
    "none": (1, 1, 1),
    "decay": (1, 0.8, 1),
    "cat": (1, 0.5, 1),  # the target says the first token with 0.5
    # The draft gives the text's tokens 0.5, 0.25 and 0.5: 0.75, 0.625, 0.75 with floor.
    "d_pace": (0.75 + 0.75 * 0.625, 0.75 * 0.625, 0.75),
}


@pytest.mark.parametrize("weights", slots.WEIGHTS)
def test_loss_by_hand(weights):
    got = score(slots.Objective(TV, weights=weights))
    first, second, other = BY_HAND[weights]
    assert got.weight == pytest.approx(first + second + other, rel=1e-5)
    mean = (0.5 * second + 0.25 * other) / (first + second + other)
    assert got.means()["loss"] == pytest.approx(mean, rel=1e-5)


def test_the_end_of_a_text_is_not_judged():
    got = score(slots.Objective(TV), real=1)
    np.testing.assert_array_equal(got.kept, [1, 0])
    assert got.loss == pytest.approx(0, abs=1e-6) and got.weight == 1
    assert got.means()["expected_length"] == pytest.approx(1, rel=1e-5)


def test_a_divergence_of_distillation_is_taken_by_name():
    got = score(slots.Objective(distill.Divergence("sequence"), "none"))
    assert got.loss == pytest.approx(-np.log(0.25) - 2 * np.log(0.5), rel=1e-5)


def test_dropped_slots_do_not_shorten_the_expected_length():
    text, target = jnp.array([[0, 1, 0]]), [TARGET[0], TARGET[1], TARGET[0]]
    draft = [(anchor, 0, TARGET[anchor % 2]) for anchor in range(3)]
    whole = [*draft, (0, 1, [0.75, 0.25]), (1, 1, [1e-9, 1.0])]
    lengths = []
    for kept in (whole, whole[:4], [*draft, whole[4]]):
        got = score(slots.Objective(TV), draft=kept, text=text, target=target)
        np.testing.assert_array_equal(got.room, [3, 2])
        lengths.append(got.means()["expected_length"])
    # 0.5 at either; with one of the two left out, its like counts for both.
    np.testing.assert_allclose(lengths, 1 + 2 / 3 * 0.5, rtol=1e-4)


def oracle(logits, gamma: int, off: int = 0) -> SlotLogits:
    """What the target itself would draft; `off` by so many rows."""
    batch, size, _ = logits.shape
    anchor, slot = np.meshgrid(np.arange(size), np.arange(gamma), indexing="ij")
    row = np.clip(anchor + slot + off, 0, size - 1).ravel()
    places = [np.broadcast_to(x.ravel(), (batch, row.size)) for x in (anchor, slot)]
    return SlotLogits(logits[:, row], *map(jnp.asarray, places))


def test_the_target_accepts_itself_and_not_the_row_beside():
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 6, 8))
    text = jnp.argmax(logits, -1).astype(jnp.int32)
    mask = jnp.arange(6)[None] < jnp.array([[6], [4]])
    how = slots.Objective(distill.Divergence("forward_kl"))
    right, *wrong = (
        slot_loss(oracle(logits, 3, off), logits, text, mask, how, gamma=3)
        for off in (0, 1, -1)
    )
    np.testing.assert_allclose(right.acceptance, right.kept, rtol=1e-5)
    np.testing.assert_array_equal(right.agreed, right.kept)
    assert right.loss == pytest.approx(0, abs=1e-4)
    # 10 anchors: 3 tokens each, but for those at the ends.
    assert right.means()["expected_length"] == pytest.approx((30 - 6) / 10, rel=1e-5)
    for twin in wrong:
        assert twin.means()["expected_length"] < 1
        assert twin.means()["loss"] > 1


def test_no_gradient_to_the_target_or_what_is_not_judged():
    logits = jax.random.normal(jax.random.key(1), (1, 2, 2))

    def loss(draft, target):
        anchor, slot = (jnp.array([[own[i] for own in DRAFT]]) for i in (0, 1))
        got = slot_loss(
            SlotLogits(draft, anchor, slot),
            target,
            TEXT,
            jnp.ones((1, 2), bool),
            slots.Objective(weights="d_pace"),
            gamma=2,
        )
        return got.means()["loss"]

    draft = jax.random.normal(jax.random.key(2), (1, len(DRAFT), 2))
    of_draft, of_target = jax.grad(loss, (0, 1))(draft, logits)
    assert not of_target.any()
    np.testing.assert_array_equal(of_draft.any(-1), [[True, True, True, False, False]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "pace"}, "loss.weights is 'pace': one of none, decay"),
        ({"weights": "decay", "slot_decay": 0.0}, "loss.slot_decay is 0.0: above"),
        ({"slot_decay": 0.5}, "loss.slot_decay is 0.5, and loss.weights cat does not"),
        ({"floor": 2.0, "weights": "d_pace"}, "loss.floor is 2.0: from 0 to 1"),
        ({"divergence": distill.Divergence("x")}, "loss.name is 'x'"),
    ],
)
def test_bad_objectives_are_named(settings, message):
    slots.check_objective(slots.Objective(), "loss")
    with pytest.raises(errors.InputError, match=message):
        slots.check_objective(slots.Objective(**settings), "loss")


def tiny_batch(target) -> step.Batch:
    inputs, mask = ragged_sources(0, 4, 6)
    text = jax.random.randint(jax.random.key(5), (4, 8), 2, 64)
    real = jnp.arange(8)[None] < jnp.array([[8], [5], [7], [3]])
    return step.Batch(inputs, mask, jnp.where(real, text, 0), real)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_moves_all_of_the_drafter_and_nothing_else():
    target = tiny_t5(0)
    config = optimizer.OptimizerConfig(
        steps=40, warmup_steps=1, learning_rate=1e-2, decay_steps=20
    )
    drafter = MedusaDrafter.create(target, {"heads": 2, "rank": 4}, jax.random.key(0))
    before = jax.tree.map(np.array, (drafter, target))
    state = step.init_state(drafter, config, jax.random.key(1))
    batch = tiny_batch(target)
    how = slots.Objective(distill.Divergence("forward_kl"), weights="none")
    seen = []
    for _ in range(40):
        state, metrics = slots.slot_step(
            state, target, batch, config=config, how=how, gamma=2
        )
        seen.append(float(metrics["loss"]))
    assert state.step == 40 and seen[-1] < 0.8 * seen[0]
    for old, new in zip(*map(jax.tree.leaves, (before[0], state.model)), strict=True):
        assert np.any(old != np.array(new))
    jax.tree.map(np.testing.assert_array_equal, before[1], target)
    assert metrics["tokens"] == 23 and metrics["grad_norm"] > 0
    scores = slots.slot_eval_step(
        state.model, target, batch, jax.random.key(0), how=how, gamma=2
    )
    assert scores.means()["loss"] < seen[0]
    # With rounded factors a step is nearly the same one.
    losses = []
    for rounds in (False, True):
        own = jax.tree.map(jnp.array, state.model)
        again = step.init_state(own, config, jax.random.key(2))
        _, metrics = slots.slot_step(
            again, target, batch, config=config, how=how, gamma=2, rounds=rounds
        )
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=1e-2)
    # No slot of the start token: no hidden state goes before it.
    assert scores.kept.tolist() == [23 - 4, 23 - 8]
    assert dataclasses.asdict(scores).keys() >= {"survival"}
