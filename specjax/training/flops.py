"""How much arithmetic a training step is, and how much the machine could do."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax import roofline
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
    passes = (
        roofline.encoder_pass(config, "float32", batch=rows, source=source),
        roofline.decoder_pass(
            config, "float32", tokens=fed, batch=rows, written=0, source=source
        ),
    )
    return sum(work.flops for work in passes)  # of any type alike


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
    read = 2 * rows * source * config.d_model * (config.encoder_width or 0)
    return 3 * forward_flops(config, rows, source, fed) - read


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
