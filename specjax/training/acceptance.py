"""Fits the head that predicts the acceptance of a drafted token.

It learns on texts that the target has written, where target and draft are both teacher
forced: the chance sum min(p, q) that a token drawn from q is accepted is known there
exactly, so that no draft need be drawn or judged (the labels of SpecDec++, Huang et al.
2024, arXiv:2405.19715, without their noise).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.acceptance_head import AcceptanceHead, head_inputs
from specjax.drafters.chain import softened
from specjax.errors import InputError
from specjax.models.base import EncoderDecoder, encode_draft
from specjax.sampling import Sampling, fit_vocabulary

_ROWS = 1024  # of a step
_DECAY, _DROPOUT = 1.0, 0.3


@struct.dataclass
class Examples:
    """Places of a text.

    Attributes:
        inputs: ``float32[B, T, F]`` of the head: see `acceptance_head.head_inputs`.
        acceptance: ``float32[B, T]`` sum min(p, q).
    """

    inputs: Float[Array, "B T F"]
    acceptance: Float[Array, "B T"]


@jax.jit
def acceptance_examples(
    target: EncoderDecoder,
    draft: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    fed: Int[Array, "B T"],
    sampling: Sampling,
) -> Examples:
    """What the head learns from: one pass of each model over texts.

    Args:
        target: the model that judges.
        draft: the model that drafts; one that shares the target's encoder reads it.
        inputs: source ids.
        mask: True at real source tokens.
        fed: the start token and the texts. Place t speaks of what follows token t.
        sampling: of both, without controls; of a greedy one the acceptance is 0 or 1.
    """
    encoded = target.encode(inputs, mask)
    own = encode_draft(draft, encoded, inputs, mask)
    judged, _ = target.decode(fed, None, encoded)
    drafted, _ = draft.decode(fed, None, own, taps=(-1,))
    p = sampling.law(judged.logits).dense(target.vocab_size)
    logits = fit_vocabulary(drafted.logits, target.vocab_size)
    q = sampling.law(logits).dense(target.vocab_size)
    soft = softened(sampling).law(logits).probs
    return Examples(head_inputs(drafted.features[0], soft), acceptance(p, q))


def acceptance(p: Float[Array, "*B V"], q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """The chance that a token drawn from q is accepted: sum min(p, q)."""
    return jnp.minimum(jnp.sum(jnp.minimum(p, q), axis=-1), 1.0)


def acceptance_loss(
    head: AcceptanceHead,
    inputs: Float[Array, "*B F"],
    p: Float[Array, "*B V"],
    q: Float[Array, "*B V"],
) -> Float[Array, "*B"]:
    """Cross entropy of the predicted acceptance, in nats, with sum min(p, q) as target.

    Args:
        head: predicts.
        inputs: of the head.
        p: the target's laws.
        q: the draft's.
    """
    return cross_entropy(head.logits(inputs), acceptance(p, q))


def cross_entropy(
    logits: Float[Array, "*B"], wanted: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """Of log-odds, against probabilities; least where they are these."""
    return jax.nn.softplus(logits) - wanted * logits


def fit_head(
    inputs: Float[Array, "N F"],
    wanted: Float[Array, " N"],
    key: Key[Array, ""],
    *,
    hidden: int = 64,
    steps: int = 1000,
    learning_rate: float = 1e-3,
    draft: str = "",
) -> AcceptanceHead:
    """A head that predicts `wanted`.

    AdamW with much decay and with dropout of inputs, since a hidden state tells where
    in the training texts it comes from; the rate falls to 0.

    Args:
        inputs: of the head, at N places.
        wanted: acceptance at each.
        key: initialises, and chooses the places of each step.
        hidden: width of the hidden layer.
        steps: of 1,024 places each.
        learning_rate: of the first step.
        draft: fingerprint of the draft.

    Raises:
        InputError: no place, or settings that mean nothing.
    """
    if not len(inputs) or steps < 1 or not learning_rate > 0:
        raise InputError(
            f"{len(inputs)} places, {steps} steps and a learning rate of "
            f"{learning_rate}: at least 1, at least 1, and above 0"
        )
    mean = jnp.mean(inputs, axis=0, keepdims=True)
    spread = jnp.std(inputs, axis=0, keepdims=True)
    spread = jnp.maximum(spread, 1e-3 * jnp.max(spread))  # one that never moves is 0
    made, chosen = jax.random.split(key)
    shape = {"features": inputs.shape[1] - 2, "hidden": hidden, "draft": draft}
    head = AcceptanceHead.create(None, shape, made)
    scaled = (inputs - mean) / spread
    head = _fit(head, scaled, wanted, chosen, steps, learning_rate)
    # Of the inputs as they come, not of scaled ones.
    inner = head.inner / spread.T
    bias = head.inner_bias - (mean @ inner)[0]
    return head.replace(inner=inner, inner_bias=bias)


@functools.partial(jax.jit, static_argnames=("steps", "learning_rate"))
def _fit(
    head: AcceptanceHead,
    inputs: Array,
    wanted: Array,
    key: Array,
    steps: int,
    learning_rate: float,
) -> AcceptanceHead:
    rate = optax.cosine_decay_schedule(learning_rate, steps)
    tune = optax.adamw(rate, weight_decay=_DECAY)

    def loss(head: AcceptanceHead, key: Array) -> Array:
        choosing, dropping = jax.random.split(key)
        rows = jax.random.randint(choosing, (_ROWS,), 0, len(inputs))
        seen = inputs[rows]
        kept = jax.random.bernoulli(dropping, 1 - _DROPOUT, seen.shape)
        seen = jnp.where(kept, seen / (1 - _DROPOUT), 0.0)
        return jnp.mean(cross_entropy(head.logits(seen), wanted[rows]))

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        head, state = carry
        update, state = tune.update(jax.grad(loss)(head, key), state, head)
        return (optax.apply_updates(head, update), state), None

    keys = jax.random.split(key, steps)
    (head, _), _ = jax.lax.scan(step, (head, tune.init(head)), keys)
    return head
