"""The optimizers against optax and by hand; schedules; settings that are refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.training import optimizer

CONFIG = t5_config.T5Config(
    vocab_size=24,
    d_model=32,
    d_kv=8,
    num_heads=4,
    d_ff=48,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
# No warm-up and no end: the learning rate is 0.1 at every step.
ADAFACTOR = optimizer.OptimizerConfig(
    name="adafactor",
    learning_rate=0.1,
    warmup_steps=0,
    decay_steps=1,
    weight_decay=0.0,
    clip=math.inf,
)


pytestmark = pytest.mark.usefixtures("standard_promotion")


def descend(rule: optax.GradientTransformation, params, steps: int = 3):
    """Parameters after some steps on random gradients, the same for the same shapes."""

    @jax.jit
    def step(params, state, number):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 8)
        grads = [
            jax.random.normal(key, x.shape) * 3.0
            for key, x in zip(keys, leaves, strict=False)
        ]
        updates, state = rule.update(
            jax.tree.unflatten(structure, grads), state, params
        )
        return optax.apply_updates(params, updates), state

    state = rule.init(params)
    for number in range(steps):
        params, state = step(params, state, number)
    return params, state


PARAMS = {
    "matrix": 0.3 * jax.random.normal(jax.random.key(1), (130, 128)),
    "small": 0.3 * jax.random.normal(jax.random.key(2), (4, 3)),
    "vector": jnp.ones(5),
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"multiply_by_parameter_scale": False},
        {"momentum": 0.9, "multiply_by_parameter_scale": False},
    ],
)
def test_adafactor_of_plain_matrices_is_that_of_optax(settings):
    ours, state = descend(
        optimizer.optimizer(dataclasses.replace(ADAFACTOR, **settings)), PARAMS
    )
    theirs, _ = descend(optax.adafactor(0.1, **settings), PARAMS)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)
    assert np.abs(ours["matrix"] - PARAMS["matrix"]).max() > 1e-2
    # Rows and columns, in place of 130 x 128 numbers.
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    full = sizes.count(130 * 128)
    assert full == (1 if "momentum" in settings else 0)
    assert {128, 130} <= set(sizes)


def test_adafactor_takes_stacked_matrices_apart():
    """q is far smaller than k: each moves by its own size, as if they lay apart."""
    stack = jnp.stack([0.01 * PARAMS["matrix"], PARAMS["matrix"]])
    (stacked, together), grads = (
        (
            {"w": stack},
            {"a": stack[0], "b": stack[1]},
        ),
        jax.random.normal(jax.random.key(4), stack.shape),
    )

    def one(rule, params, grads):
        return rule.update(grads, rule.init(params), params)[0]

    ours, theirs = optimizer.optimizer(ADAFACTOR), optax.adafactor(0.1)
    expected = one(theirs, together, {"a": grads[0], "b": grads[1]})
    found = one(ours, stacked, {"w": grads})["w"]
    fused = one(theirs, stacked, {"w": grads})["w"]
    for number, name in enumerate("ab"):
        np.testing.assert_allclose(found[number], expected[name], rtol=1e-4, atol=1e-7)
    # The wrong twin, optax's own: q moves by some part of k's size.
    assert jnp.linalg.norm(fused[0]) > 10 * jnp.linalg.norm(expected["a"])


@pytest.mark.parametrize("name", optimizer.NAMES)
def test_weight_decay_is_decoupled_and_spares_norms_and_biases(name):
    config = dataclasses.replace(ADAFACTOR, name=name, weight_decay=0.5)
    params = {"matrix": jnp.ones((4, 3)), "bias": jnp.ones((4, 3)), "norm": jnp.ones(3)}
    rule = optimizer.optimizer(config)
    updates, _ = rule.update(
        jax.tree.map(jnp.zeros_like, params), rule.init(params), params
    )
    np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5, rtol=1e-6)
    assert not updates["bias"].any() and not updates["norm"].any()


def test_clipping_bounds_the_whole_gradient():
    """Adam hardly sees the scale of a gradient; its first moment does."""
    config = optimizer.OptimizerConfig(clip=2.0)
    rule = optimizer.optimizer(config)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(4)}
    grads = jax.tree.map(lambda x: x + 100.0, params)
    _, state = rule.update(grads, rule.init(params), params)
    moments = optax.tree.get(state, "mu")
    norm = float(optax.tree.norm(moments)) / (1 - config.b1)
    assert norm == pytest.approx(2.0, rel=1e-5)


def test_norms_and_biases_do_not_decay():
    decays = optimizer._decays(t5.T5(CONFIG, jax.random.key(0)))
    attention = decays.encoder[0].attention
    assert jax.tree.leaves(attention.qkv) == [True]
    assert jax.tree.leaves(attention.bias) == [False]
    assert jax.tree.leaves(attention.norm) == [False]


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("trapezoid", {0: 0.1, 9: 1.0, 50: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
        ("inverse_sqrt", {0: 0.1, 9: 1.0, 39: 0.5, 89: 1 / 3}),
        ("cosine", {0: 0.1, 9: 1.0, 54: 0.525, 99: 0.05}),
    ],
)
def test_schedules(schedule, points):
    config = optimizer.OptimizerConfig(
        learning_rate=2.0, warmup_steps=10, steps=100, decay_steps=20, schedule=schedule
    )
    rate = optimizer.learning_rate(config)
    for at, expected in points.items():
        assert float(rate(jnp.array(at))) == pytest.approx(2.0 * expected, abs=1e-6)


def test_unknown_schedule_is_named():
    with pytest.raises(errors.InputError, match="'linear' is unknown"):
        optimizer.learning_rate(optimizer.OptimizerConfig(schedule="linear"))


def test_inverse_sqrt_is_t5_s_after_the_warm_up():
    config = optimizer.OptimizerConfig(
        schedule="inverse_sqrt", warmup_steps=400, learning_rate=400**-0.5
    )
    rate = optimizer.learning_rate(config)
    for step in (400, 1000, 40_000):
        # T5 counts from 1; this from 0.
        assert float(rate(jnp.array(step - 1))) == pytest.approx(
            1 / math.sqrt(max(step, 400)), rel=1e-6
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "the optimizer 'sgd' is unknown"),
        ({"schedule": "linear"}, "the schedule 'linear' is unknown"),
        ({"learning_rate": 0.0}, r"o\.learning_rate is 0.0: above 0"),
        ({"clip": math.nan}, r"o\.clip is nan: above 0"),
        ({"weight_decay": math.nan}, r"o\.weight_decay is nan: at least 0"),
        ({"steps": 0}, r"o\.steps is 0: at least 1"),
        ({"b2": 1.0}, r"o\.b2 is 1.0: in \[0, 1\)"),
        ({"momentum": 0.9}, r"o\.momentum is 0.9.*'adafactor' alone.*'adamw'"),
        (
            {"multiply_by_parameter_scale": False},
            r"o\.multiply_by_parameter_scale is False.*leave .* at True",
        ),
        ({"name": "adafactor", "b1": 0.8}, r"o\.b1 is 0.8.*'adamw' alone"),
        ({"name": "adafactor", "b2": 0.9}, r"o\.b2 is 0.9.*leave b2 at 0.98"),
        ({"schedule": "cosine", "decay_steps": 20}, r"o\.decay_steps is 20.*'cosine'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    config = optimizer.OptimizerConfig(**settings)
    with pytest.raises(errors.InputError, match=message):
        optimizer.check_optimizer(config, "o")


def test_each_field_is_read_by_some_optimizer():
    optimizer.check_optimizer(optimizer.OptimizerConfig(b1=0.8, decay_steps=20), "o")
    optimizer.check_optimizer(
        optimizer.OptimizerConfig(
            name="adafactor", momentum=0.9, multiply_by_parameter_scale=False
        ),
        "o",
    )
