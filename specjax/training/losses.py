"""Losses and counts over target tokens; padding weighs nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class TokenLoss:
    """Sums over the tokens of a batch, so that batches add up by plain addition.

    Attributes:
        loss: cross entropy against the smoothed targets, in nats, plus `z_loss`.
        nll: negative log-likelihood of the targets, in nats.
        z_loss: the weighted squares of the log normalisers; 0 where none was asked for.
        correct: tokens whose argmax is the target.
        tokens: tokens that count.
        exact: rows all of whose tokens have the right argmax under teacher forcing,
            which is to say rows that greedy decoding reproduces.
        rows: rows that hold any token.
    """

    loss: Float[Array, ""]
    nll: Float[Array, ""]
    z_loss: Float[Array, ""]
    correct: Float[Array, ""]
    tokens: Float[Array, ""]
    exact: Float[Array, ""]
    rows: Float[Array, ""]


def shift_right(targets: Int[Array, "B T"], pad_id: int = 0) -> Int[Array, "B T"]:
    """Decoder input for `targets`: the start token (pad), then all but the last."""
    return jnp.pad(targets, ((0, 0), (1, 0)), constant_values=pad_id)[:, :-1]


def token_loss(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> TokenLoss:
    """Cross entropy of next-token logits, summed over the tokens of `mask`.

    Args:
        logits: row t predicts ``targets[:, t]``.
        targets: token ids.
        mask: True at real targets, end of sequence included.
        label_smoothing: mass spread evenly over the vocabulary, as in Szegedy et al.
            2016 (arXiv:1512.00567); 0 is plain cross entropy.
        z_loss: weight of the square of each position's log normaliser, which keeps
            logits from drifting where a softmax does not see it: 1e-4 in the training
            of T5 (Raffel et al. 2020, arXiv:1910.10683, in its code) and of PaLM
            (Chowdhery et al. 2022, arXiv:2204.02311).

    Returns:
        Sums; ``loss / tokens`` is the mean that training minimises.
    """
    logits = logits.astype(jnp.float32)
    weights = mask.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = normaliser - picked
    loss = nll
    if label_smoothing:
        uniform = normaliser - jnp.mean(logits, axis=-1)
        loss = (1.0 - label_smoothing) * nll + label_smoothing * uniform
    square = z_loss * normaliser**2 if z_loss else jnp.zeros_like(nll)
    right = jnp.argmax(logits, axis=-1) == targets
    any_token = jnp.any(mask, axis=-1)
    exact = jnp.all(right | ~mask, axis=-1) & any_token
    return TokenLoss(
        loss=jnp.sum((loss + square) * weights),
        nll=jnp.sum(nll * weights),
        z_loss=jnp.sum(square * weights),
        correct=jnp.sum(jnp.where(right, weights, 0.0)),
        tokens=jnp.sum(weights),
        exact=jnp.sum(exact.astype(jnp.float32)),
        rows=jnp.sum(any_token.astype(jnp.float32)),
    )
