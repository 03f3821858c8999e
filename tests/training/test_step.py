"""The train step learns what can be learnt, and nothing else."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.training import distill, init, optimizer, step

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
OPTIMIZER = optimizer.OptimizerConfig(
    learning_rate=1e-2, warmup_steps=5, steps=100, decay_steps=33
)


pytestmark = pytest.mark.usefixtures("standard_promotion")


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


def test_label_smoothing_and_z_loss_enter_the_loss():
    model = t5.T5(CONFIG, jax.random.key(0))
    state = step.init_state(model, OPTIMIZER, jax.random.key(1))
    _, metrics = step.train_step(
        state, copy_batch(0), config=OPTIMIZER, label_smoothing=0.1, z_loss=0.1
    )
    assert float(metrics["z_loss"]) > 0
    smoothed = float(metrics["loss"] - metrics["z_loss"])
    assert smoothed != pytest.approx(float(metrics["nll"]), rel=1e-3)


def uneven_batch(rows: int = 8) -> step.Batch:
    """Row r has ``1 + r % 4 * 2`` target tokens, so that groups of rows differ."""
    batch = jax.tree.map(lambda x: x[:rows], copy_batch(3))
    lengths = 1 + jnp.arange(rows) % 4 * 2
    return batch.replace(targets_mask=jnp.arange(8)[None, :] < lengths[:, None])


def only_rows(batch: step.Batch, first: int, stride: int) -> step.Batch:
    """The batch in which only every `stride`-th row has targets."""
    rows = jnp.arange(len(batch.targets)) % stride == first
    return batch.replace(targets_mask=batch.targets_mask & rows[:, None])


def apart(one, other) -> float:
    """How far two trees of gradients are, relative to the first."""
    norm = [
        jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))
        for tree in (jax.tree.map(jnp.subtract, one, other), one)
    ]
    return float(norm[0] / norm[1])


@pytest.mark.slow
def test_accumulated_gradients_are_the_whole_batch_s():
    model = init.mimetic_init(t5.T5(CONFIG, jax.random.key(0)))
    target, batch = t5.T5(CONFIG, jax.random.key(5)), uneven_batch()
    compiled = jax.jit(
        step.mean_gradients, static_argnames=("z_loss", "accumulate", "divergence")
    )

    def gradients(batch: step.Batch, accumulate: int):
        return compiled(
            model,
            batch,
            jax.random.key(1),
            z_loss=1e-2,
            accumulate=accumulate,
            target=target,
            divergence=distill.Divergence(),
        )

    whole, metrics = gradients(batch, 1)
    grads, summed = gradients(batch, 4)
    assert apart(whole, grads) < 1e-5
    assert summed.keys() == metrics.keys() == {*"loss nll tokens z_loss alpha".split()}
    assert float(summed["tokens"]) == 32
    for name, value in metrics.items():
        assert float(summed[name]) == pytest.approx(float(value), rel=1e-5), name

    # The wrong twin, a mean of means: each part weighs the same, whatever it holds.
    means = [gradients(only_rows(batch, first, 4), 1)[0] for first in range(4)]
    assert apart(whole, jax.tree.map(lambda *parts: sum(parts) / 4, *means)) > 1e-2


def test_each_micro_batch_draws_its_own_dropout():
    config = dataclasses.replace(CONFIG, dropout_rate=0.3)
    model = init.mimetic_init(t5.T5(config, jax.random.key(0)))
    rows = jax.tree.map(lambda x: x[:4], copy_batch(0))
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), rows)

    @jax.jit
    def loss(model: t5.T5, batch: step.Batch) -> dict[str, jax.Array]:
        return step.mean_gradients(model, batch, jax.random.key(1), accumulate=2)[1]

    one, other = (loss(model, only_rows(twice, first, 2)) for first in range(2))
    assert loss(model, only_rows(twice, 0, 2)) == one
    # The two micro-batches hold the same rows: with one mask they would agree.
    assert abs(float(one["loss"] - other["loss"])) > 1e-3


def test_bfloat16_computes_and_float32_is_kept():
    def state() -> step.TrainState:
        model = init.mimetic_init(t5.T5(CONFIG, jax.random.key(0)))
        return step.init_state(model, OPTIMIZER, jax.random.key(1))

    def operands(dtype) -> list[set[str]]:
        """Types of the factors of each product of matrices."""
        lowered = step.train_step.lower(
            state(), copy_batch(0), config=OPTIMIZER, compute_dtype=dtype
        )
        dots = re.findall(
            r"dot_general .* : \((.*)\) -> tensor<\d+x\d.*>", lowered.as_text()
        )
        return [set(re.findall(r"x(bf16|f32)>", dot)) for dot in dots]

    assert all(factors == {"f32"} for factors in operands(None))
    narrow = operands(jnp.bfloat16)
    # Scores and logits are summed in float32, whose gradients come back in float32: two
    # products for each of the three attentions and for the head.
    assert narrow.count({"f32"}) <= 8
    assert narrow.count({"bf16"}) == len(narrow) - narrow.count({"f32"}) > 40

    before = state()
    old = jax.tree.leaves(before)
    kept = [leaf.dtype for leaf in old]
    after, metrics = step.train_step(
        before, copy_batch(0), config=OPTIMIZER, compute_dtype=jnp.bfloat16
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == kept
    assert all(leaf.is_deleted() for leaf in old), "the state is donated"
    _, exact = step.train_step(state(), copy_batch(0), config=OPTIMIZER)
    assert metrics["loss"].dtype == jnp.float32
    assert float(metrics["loss"]) == pytest.approx(float(exact["loss"]), rel=1e-2)
    assert float(metrics["loss"]) != float(exact["loss"])
    assert float(metrics["grad_norm"]) == pytest.approx(
        float(exact["grad_norm"]), rel=3e-2
    )


def test_products_of_bfloat16_factors_compute_nearly_the_same():
    def state() -> step.TrainState:
        model = init.mimetic_init(t5.T5(CONFIG, jax.random.key(0)))
        return step.init_state(model, OPTIMIZER, jax.random.key(1))

    def text(dtype) -> str:
        return step.train_step.lower(
            state(), copy_batch(0), config=OPTIMIZER, compute_dtype=dtype
        ).as_text()

    # All projections there and back, of one layer each side and the head; no scores.
    rounded = re.findall(
        r"dot_general .*xbf16>.*xbf16>\) -> .*xf32>", text(step.PRODUCTS)
    )
    assert len(rounded) == 3 * 12 and "bf16" not in text(None)

    after, metrics = step.train_step(
        state(), copy_batch(0), config=OPTIMIZER, compute_dtype=step.PRODUCTS
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(after.model)} == {
        jnp.dtype("float32")
    }
    _, exact = step.train_step(state(), copy_batch(0), config=OPTIMIZER)
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(exact[name]), rel=1e-2)
        assert float(metrics[name]) != float(exact[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate": 3}, "accumulate is 3, and the batch has 32 rows"),
        ({"accumulate": 0}, "accumulate is 0, and the batch has 32 rows"),
        ({"z_loss": -1.0}, "z_loss is -1.0: at least 0"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"compute_dtype": jnp.float16}, "compute_dtype is float16"),
        ({"divergence": distill.Divergence()}, "given together"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    state = step.init_state(
        t5.T5(CONFIG, jax.random.key(0)), OPTIMIZER, jax.random.key(1)
    )
    with pytest.raises(errors.InputError, match=message):
        step.train_step(state, copy_batch(0), config=OPTIMIZER, **arguments)
    assert not state.step.is_deleted()


def test_labels_are_not_smoothed_where_a_target_takes_their_place():
    model = t5.T5(CONFIG, jax.random.key(0))
    with pytest.raises(errors.InputError, match="label_smoothing is 0.1"):
        step.mean_gradients(
            model,
            copy_batch(0),
            jax.random.key(1),
            label_smoothing=0.1,
            target=model,
            divergence=distill.Divergence(),
        )
