"""How much arithmetic a training step is, and how much the machine could do."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.models import t5_config


def forward_flops(config: t5_config.T5Config, rows: int, source: int, fed: int) -> int:
    """Operations of the matrix products of one teacher-forced pass.

    A product of ``[m, k]`` and ``[k, n]`` is 2 m k n. Padding counts: it is computed.
    Everything else (norms, softmax, biases) is left out.

    Args:
        config: the model's shape.
        rows: of the batch.
        source: tokens of each source, padding included.
        fed: tokens of each target, padding included.
    """
    return 2 * rows * (_products(config, source, fed) + _read(config, source))


def train_flops(config: t5_config.T5Config, rows: int, source: int, fed: int) -> int:
    """The same of a training step: forward, and twice as much for the gradients.

    Each product has two gradients, of either factor; but the target's encoder output
    that a draft without an encoder reads needs none.

    Args:
        config: the model's shape.
        rows: of the batch.
        source: tokens of each source, padding included.
        fed: tokens of each target, padding included.
    """
    return 2 * rows * (3 * _products(config, source, fed) + 2 * _read(config, source))


def _read(config: t5_config.T5Config, source: int) -> int:
    """Multiplications of one row to read a target's encoder output."""
    return source * config.d_model * (config.encoder_width or 0)


def _products(config: t5_config.T5Config, source: int, fed: int) -> int:
    """All other multiplications of one row."""
    width, inner = config.d_model, config.d_attention
    feed_forward = (3 if config.gated else 2) * width * config.d_ff
    # Queries, keys, values and the projection out: four products; then the scores and
    # the mixture, two.
    encoder = source * (4 * width * inner + feed_forward) + 2 * source**2 * inner
    decoder = fed * (4 * width * inner + feed_forward) + 2 * fed**2 * inner
    cross = 2 * (fed + source) * width * inner + 2 * fed * source * inner
    return (
        config.num_encoder_layers * encoder
        + config.num_decoder_layers * (decoder + cross)
        + fed * width * config.vocab_size
    )


def matmul_peak(
    dtype: DTypeLike = jnp.float32, size: int = 2048, repeats: int = 5
) -> float:
    """Operations a second of a square matrix product: what this machine can do.

    Args:
        dtype: of the matrices.
        size: rows and columns of each.
        repeats: timed products; their median counts.
    """
    square = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(square, square))
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)
