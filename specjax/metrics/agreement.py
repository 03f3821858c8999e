"""Alpha: how far the draft's laws agree with the target's on target-generated text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import checks
from specjax.drafters.base import Committed, Drafter
from specjax.errors import InputError
from specjax.models.base import EncoderDecoder
from specjax.sampling import (
    Sampling,
    check_sampling,
    draft_settings,
    fit_vocabulary,
    with_arrays,
)
from specjax.types import Law, Noise, Prefix
from specjax.verify import token_verify


@struct.dataclass
class Agreement:
    """How far the draft's laws agree with the target's, prefix by prefix.

    Column t speaks of the token that follows ``tokens[:, : t + 1]``. Average over
    `valid` alone, or let `alpha` and `mean_entropy` do it.

    Attributes:
        beta: ``float32[B, T]`` sum over ids of min(p, q): the probability that a token
            drafted here is accepted.
        kept: ``float32[B, T]`` min(1, q(x) / p(x)) of the text's own token x. Token
            verification emits x as an accepted draft with the chance min(p(x), q(x)),
            and in all with p(x): so, given the text, a token that was drafted there was
            kept with this chance. Its mean over the target's texts is alpha.
        entropy: ``float32[B, T]`` of the target's law, in nats.
        valid: ``bool[B, T]`` whether the row's own output has a token there.
    """

    beta: Float[Array, "B T"]
    kept: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    valid: Bool[Array, "B T"]


def overlap(p: Law, q: Law) -> Float[Array, "*B N"]:
    """Sum over ids of min(p, q), which is 1 - total variation.

    Args:
        p: laws, dense or sparse with distinct ids.
        q: as many.

    Returns:
        the greatest probability with which a draw from q can be kept as a draw from p.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Theorem 3.5.
    """
    sparse, other = (p, q) if q.ids is None else (q, p)
    if sparse.ids is None:
        shared = jnp.minimum(p.probs, q.probs)
    else:
        at_ids = jax.vmap(other.at, in_axes=-1, out_axes=-1)(sparse.ids)
        shared = jnp.minimum(sparse.probs, at_ids)
    return jnp.minimum(jnp.sum(shared, axis=-1), 1.0)  # 1 + 1e-7 is rounding


def teacher_forced_alpha(
    target: EncoderDecoder,
    drafter_model: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    tokens: Int[Array, "B L"],
    length: Int[Array, " B"],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen record)
    draft_sampling: Sampling | None = None,
    prefix_length: Int[Array, " B"] | None = None,
) -> Agreement:
    """Acceptance probability at every prefix of `tokens`, one pass of each model.

    Alpha is its mean over target-generated text, so `tokens` should come from the
    target alone or from lossless speculation, under the same `sampling`.

    Args:
        target: the model that judges.
        drafter_model: the model that drafts; its vocabulary may be padded otherwise.
        inputs: source ids.
        mask: True at real source tokens.
        tokens: start token first, as in `DecodeOutput.tokens`, L >= 2.
        length: valid tokens of each row.
        sampling: how the target's logits become p.
        draft_sampling: the same for q; None: as `sampling`.
        prefix_length: leading tokens that were given, not generated; default 1, the
            start token.

    Returns:
        the agreement at L - 1 positions. Needs memory for a few ``float32[B, L, V]``.

    Raises:
        InputError: tokens and length that do not fit together, or settings that mean
            nothing.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Corollary 3.6.
    """
    prefix_length = _check_text(tokens, length, prefix_length)
    draft_sampling = draft_settings(sampling, draft_sampling)
    check_sampling(sampling, "sampling", tokens.shape[0])
    check_sampling(draft_sampling, "draft_sampling", tokens.shape[0])
    return _teacher_forced(
        target,
        drafter_model,
        inputs,
        mask,
        tokens,
        length,
        prefix_length,
        with_arrays(sampling),
        with_arrays(draft_sampling),
    )


def drafter_alpha(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    tokens: Int[Array, "B L"],
    length: Int[Array, " B"],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen record)
    draft_sampling: Sampling | None = None,
    prefix_length: Int[Array, " B"] | None = None,
) -> Agreement:
    """The same for any drafter with a law: asks it for one token at every prefix.

    A prefix at which it drafts nothing has beta 0. For a model drafter this equals
    `teacher_forced_alpha`, in L - 1 steps one after the other.

    Args:
        drafter: the drafter. The rest: as `teacher_forced_alpha`.

    Raises:
        InputError: as `teacher_forced_alpha`, and a drafter without a law.
    """
    prefix_length = _check_text(tokens, length, prefix_length)
    if not drafter.has_law:
        raise InputError(
            f"alpha needs the draft's law and {type(drafter).__name__} has none: read "
            "acceptance_rate and survival of a decode instead"
        )
    batch = tokens.shape[0]
    check_sampling(sampling, "sampling", batch)
    draft_sampling = checks.check_speculation(
        drafter, token_verify, sampling, draft_sampling, 1, batch
    )
    return _drafter_alpha(
        target,
        drafter,
        inputs,
        mask,
        tokens,
        length,
        prefix_length,
        with_arrays(sampling),
        with_arrays(draft_sampling),
    )


def alpha(*agreements: Agreement) -> float:
    """Mean beta over all valid prefixes of all batches; NaN where there is none."""
    return _mean_valid(agreements, "beta")


def mean_entropy(*agreements: Agreement) -> float:
    """Mean entropy of the target's law in nats; NaN where there is no valid prefix."""
    return _mean_valid(agreements, "entropy")


def _mean_valid(agreements: Sequence[Agreement], field: str) -> float:
    total, count = 0.0, 0
    for agreement in agreements:
        valid = np.asarray(agreement.valid)
        total += float(np.asarray(getattr(agreement, field), np.float64)[valid].sum())
        count += int(valid.sum())
    return total / count if count else math.nan


def _check_text(
    tokens: Array, length: Array, prefix_length: Array | None
) -> Int[Array, " B"]:
    batch, size = tokens.shape
    if size < 2:
        raise InputError(
            f"tokens have {size} column: the start token and one more at least"
        )
    if length.shape != (batch,) or np.any(np.asarray(length) > size):
        raise InputError(
            f"length is {np.asarray(length).tolist()}: one number per row ({batch}), "
            f"each at most {size}"
        )
    if prefix_length is None:
        return jnp.ones(batch, jnp.int32)
    if prefix_length.shape != (batch,) or np.any(np.asarray(prefix_length) < 1):
        raise InputError(
            f"prefix_length is {np.asarray(prefix_length).tolist()}: one number per "
            f"row ({batch}), each at least 1"
        )
    return prefix_length


def _kept(p: Law, q: Law, tokens: Array) -> Array:
    # Where p is 0 two ids scored alike up to rounding: the draft then has it or not.
    p_token, q_token = p.at(tokens), q.at(tokens)
    return jnp.minimum(q_token / jnp.maximum(p_token, jnp.finfo(p_token.dtype).tiny), 1)


def _agreement(
    beta: Array,
    kept: Array,
    p: Law,
    vocab_size: int,
    length: Array,
    prefix_length: Array,
) -> Agreement:
    place = jnp.arange(1, beta.shape[1] + 1, dtype=jnp.int32)[None]  # of what follows
    return Agreement(
        beta=beta,
        kept=kept,
        entropy=jnp.sum(jax.scipy.special.entr(p.dense(vocab_size)), axis=-1),
        valid=(place >= prefix_length[:, None]) & (place < length[:, None]),
    )


def _prefixes(tokens: Array) -> Prefix:
    places = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)
    length = jnp.broadcast_to(places, (tokens.shape[0], places.shape[0]))
    return Prefix(tokens=tokens, length=length)


@jax.jit
def _teacher_forced(
    target: EncoderDecoder,
    drafter_model: EncoderDecoder,
    inputs: Array,
    mask: Array,
    tokens: Array,
    length: Array,
    prefix_length: Array,
    sampling: Sampling,
    draft_sampling: Sampling,
) -> Agreement:
    def law(model: EncoderDecoder, sampling: Sampling) -> Law:
        output, _ = model.decode(tokens[:, :-1], None, model.encode(inputs, mask))
        logits = fit_vocabulary(output.logits, target.vocab_size)
        return sampling.law(logits, _prefixes(tokens))

    p, q = law(target, sampling), law(drafter_model, draft_sampling)
    return _agreement(
        overlap(p, q),
        _kept(p, q, tokens[:, 1:]),
        p,
        target.vocab_size,
        length,
        prefix_length,
    )


@jax.jit
def _drafter_alpha(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Array,
    mask: Array,
    tokens: Array,
    length: Array,
    prefix_length: Array,
    sampling: Sampling,
    draft_sampling: Sampling,
) -> Agreement:
    batch, size = tokens.shape
    encoded = target.encode(inputs, mask)
    output, _ = target.decode(tokens[:, :-1], None, encoded, taps=drafter.taps)
    p = sampling.law(output.logits, _prefixes(tokens))
    one = jnp.ones(batch, jnp.int32)
    # A drafter may write one block past what it reads.
    buffer = jnp.pad(tokens, ((0, 0), (0, 2)))
    written = jnp.arange(size + 2, dtype=jnp.int32)[None]
    # Of the token before the draft and, unused after a rejection, of the draft.
    features = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0))), output.features
    )
    state = drafter.init(target, encoded, inputs, mask, tokens[:, :1], one, size + 2)
    # The law of the first token of a block depends on no noise.
    keys = jax.random.split(jax.random.key(0), batch)

    def step(state: Any, place: Array) -> tuple[Any, tuple[Array, Array]]:
        block, state = drafter.draft(
            target,
            Noise(keys=keys, start=one * (place - 1)),
            state,
            jnp.where(written < place, buffer, 0),
            one * place,
            gamma=1,
            sampling=draft_sampling,
        )
        if block.law is None:
            raise InputError(f"{type(drafter).__name__} has a law, but gave none")
        here = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, place - 1, 1, axis=1), p
        )
        token = jax.lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
        beta, kept = (
            jnp.where(block.length > 0, chance[:, 0], 0.0)
            for chance in (
                overlap(here, block.law),
                _kept(here, block.law, token),
            )
        )
        committed = Committed(
            tokens=jnp.where(written <= place, buffer, 0),
            length=one * (place + 1),
            num_accepted=0 * one,
            features=jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, place - 1, 2, axis=1),
                features,
            ),
        )
        return drafter.commit(state, committed), (beta, kept)

    places = jnp.arange(1, size, dtype=jnp.int32)
    _, (beta, kept) = jax.lax.scan(step, state, places)
    return _agreement(beta.T, kept.T, p, target.vocab_size, length, prefix_length)
