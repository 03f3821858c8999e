"""The operations of a step, against what the compiler counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.models import t5, t5_config
from specjax.training import flops, step

CONFIG = t5_config.T5Config(
    vocab_size=1000,
    d_model=128,
    d_kv=32,
    num_heads=4,
    d_ff=384,
    num_encoder_layers=2,
    num_decoder_layers=3,
    dropout_rate=0.0,
)
ROWS, SOURCE, FED = 4, 48, 24


def counted(function, *arguments) -> float:
    """Operations of the program."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


@pytest.mark.parametrize("gated", [True, False])
def test_against_the_compiler(gated):
    """Which counts a few per cent of other operations too."""
    config = dataclasses.replace(CONFIG, gated=gated)
    model = jax.eval_shape(lambda: t5.T5(config, jax.random.key(0)))
    batch = step.Batch(
        inputs=jax.ShapeDtypeStruct((ROWS, SOURCE), jnp.int32),
        inputs_mask=jax.ShapeDtypeStruct((ROWS, SOURCE), bool),
        targets=jax.ShapeDtypeStruct((ROWS, FED), jnp.int32),
        targets_mask=jax.ShapeDtypeStruct((ROWS, FED), bool),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    ours = flops.forward_flops(config, ROWS, SOURCE, FED)
    assert ours == pytest.approx(counted(step.teacher_forced, model, batch), rel=0.05)
    ours = flops.train_flops(config, ROWS, SOURCE, FED)
    assert ours == pytest.approx(
        counted(step.mean_gradients, model, batch, key), rel=0.05
    )
    assert ours == 3 * flops.forward_flops(config, ROWS, SOURCE, FED)


def test_by_hand():
    """One layer each, width 2, one head of 1: products counted one by one."""
    config = t5_config.T5Config(
        vocab_size=5,
        d_model=2,
        d_kv=1,
        num_heads=1,
        d_ff=3,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    source, fed = 7, 4
    encoder = 7 * (3 * 2 + 2 + 3 * 6) + 7 * 7 * 2
    decoder = 4 * (3 * 2 + 2 + 3 * 6) + 4 * 4 * 2
    cross = 4 * (2 + 2) + 7 * (2 * 2) + 4 * 7 * 2
    head = 4 * 2 * 5
    whole = encoder + decoder + cross + head
    assert flops.forward_flops(config, 3, source, fed) == 3 * 2 * whole
    shared = dataclasses.replace(config, num_encoder_layers=0, encoder_width=6)
    rest = decoder + cross + head
    assert flops.forward_flops(shared, 3, source, fed) == 3 * 2 * (rest + 7 * 6 * 2)
    # The target's encoder output gets no gradient.
    assert flops.train_flops(shared, 3, source, fed) == 3 * 2 * (
        3 * rest + 2 * 7 * 6 * 2
    )


def test_the_peak_is_a_rate():
    """Smaller than any machine's, larger than one without vector instructions."""
    assert 1e8 < flops.matmul_peak(size=256, repeats=2) < 1e17
