"""The train step learns what can be learnt, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.training import init, step

CONFIG = t5_config.T5Config(
    vocab_size=24,
    d_model=32,
    d_kv=8,
    num_heads=4,
    d_ff=48,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.0,
)
OPTIMIZER = step.OptimizerConfig(
    learning_rate=1e-2, warmup_steps=5, steps=100, decay_steps=33
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def copy_batch(number: int, *, shuffled: bool = False) -> step.Batch:
    """Sources of random ids to copy; `shuffled`: the targets of other rows."""
    ids = jax.random.randint(jax.random.key(number), (32, 8), 2, CONFIG.vocab_size)
    ids = ids.at[:, -1].set(1)
    mask = jnp.ones_like(ids, bool)
    targets = jnp.roll(ids, 1, axis=0) if shuffled else ids
    return step.Batch(ids, mask, targets, mask)


def run(batches, config=OPTIMIZER, model_config=CONFIG) -> tuple[step.TrainState, list]:
    model = init.mimetic_init(t5.T5(model_config, jax.random.key(0)))
    state = step.init_state(model, config, jax.random.key(1))
    history = []
    for batch in batches:
        state, metrics = step.train_step(state, batch, config=config)
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


def test_copy_task_is_learnt_and_a_broken_one_is_not():
    fresh = copy_batch(1000)
    state, history = run(copy_batch(i) for i in range(100))
    assert history[-1]["nll"] < 0.25 * history[0]["nll"]
    sums = step.eval_step(state.model, fresh)
    assert float(sums.correct / sums.tokens) > 0.75

    # Labels that belong to another source: only the end of sequence can be learnt.
    state, _ = run(copy_batch(i, shuffled=True) for i in range(100))
    sums = step.eval_step(state.model, copy_batch(1000, shuffled=True))
    assert float(sums.correct / sums.tokens) < 0.35


def test_no_token_sees_its_own_label():
    model = init.mimetic_init(t5.T5(CONFIG, jax.random.key(0)))
    batch = copy_batch(0)
    changed = batch.replace(targets=batch.targets.at[:, 4].set(2))
    before, after = (step.teacher_forced(model, b) for b in (batch, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.array_equal(before[:, 5:], after[:, 5:])


def test_metrics_and_counters():
    state, history = run([copy_batch(0), copy_batch(1)])
    assert int(state.step) == 2
    assert history[0]["tokens"] == 256
    assert history[0]["learning_rate"] == pytest.approx(1e-2 / 5)
    assert history[1]["learning_rate"] == pytest.approx(2e-2 / 5)


def test_dropout_depends_on_the_step_alone():
    config = dataclasses.replace(CONFIG, dropout_rate=0.3)
    same = [copy_batch(0)] * 2
    first, second = run(same, model_config=config)[1], run(same, model_config=config)[1]
    assert first == second
    assert first[0]["nll"] != run(same)[1][0]["nll"]


def test_label_smoothing_enters_the_loss():
    model = t5.T5(CONFIG, jax.random.key(0))
    state = step.init_state(model, OPTIMIZER, jax.random.key(1))
    _, metrics = step.train_step(
        state, copy_batch(0), config=OPTIMIZER, label_smoothing=0.1
    )
    assert float(metrics["loss"]) != float(metrics["nll"])


def test_norms_and_biases_do_not_decay():
    decays = step._decays(t5.T5(CONFIG, jax.random.key(0)))
    attention = decays.encoder[0].attention
    assert jax.tree.leaves(attention.qkv) == [True]
    assert jax.tree.leaves(attention.bias) == [False]
    assert jax.tree.leaves(attention.norm) == [False]


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("trapezoid", {0: 0.1, 9: 1.0, 50: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        ("inverse_sqrt", {0: 0.1, 9: 1.0, 39: 0.5, 89: 1 / 3}),
        ("cosine", {0: 0.0, 10: 1.0, 55: 0.525, 100: 0.05}),
    ],
)
def test_schedules(schedule, points):
    config = step.OptimizerConfig(
        learning_rate=2.0, warmup_steps=10, steps=100, decay_steps=20, schedule=schedule
    )
    rate = step.learning_rate(config)
    for at, expected in points.items():
        assert float(rate(jnp.array(at))) == pytest.approx(2.0 * expected, abs=1e-6)


def test_unknown_schedule_is_named():
    with pytest.raises(errors.InputError, match="'linear' is unknown"):
        step.learning_rate(step.OptimizerConfig(schedule="linear"))
