"""Where two decodes of the same rows part, and how near a choice it was there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decode_state import SAMPLE, fold_rows
from specjax.decoding import DecodeOutput
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, clock_speeds, with_arrays
from specjax.types import Prefix


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which two decodes of a row differ.

    Attributes:
        row: of the batch.
        position: index of the token in the buffer.
        gap: what the scores of the two tokens differ by, in logits. Rounding alone
            makes two ways of decoding differ where it is tiny, and only there. Infinite
            where one of them ends and the other goes on.
    """

    row: int
    position: int
    gap: float


def differences(
    target: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    keys: Key[Array, " B"],
    plain: DecodeOutput,
    other: DecodeOutput,
    *,
    sampling: Sampling,
) -> list[Difference]:
    """Where another decode leaves the target's own, row by row.

    Greedily a token's score is its logit. Of sampled tokens it is the T (log p + Gumbel
    noise) whose largest `autoregressive_generate` writes: for decodes that draw each
    position from the noise that this one does (`coupled_verify`).

    Args:
        target: the model whose output `plain` is.
        inputs: source ids.
        mask: True at real source tokens.
        keys: that `plain` was drawn with.
        plain: of `autoregressive_generate`.
        other: of the same rows.
        sampling: of both.

    Returns:
        one entry for each row that differs.
    """
    one, two = _until_its_end(plain), _until_its_end(other)
    rows = np.flatnonzero((one != two).any(1))
    if not rows.size:
        return []
    position = np.argmax(one != two, axis=1).astype(np.int32)
    every = np.arange(len(one))
    chosen = np.stack([one[every, position], two[every, position]], axis=1)
    gaps = _gaps(
        target,
        inputs,
        mask,
        keys,
        plain.tokens,
        jnp.asarray(position),
        jnp.asarray(np.maximum(chosen, 0)),
        with_arrays(sampling),
    )
    gaps = np.where((chosen < 0).any(1), np.inf, np.asarray(gaps))
    return [Difference(int(r), int(position[r]), float(gaps[r])) for r in rows]


def _until_its_end(output: DecodeOutput) -> Int[np.ndarray, "B L"]:
    """The tokens, and -1 past the end: a text is not the same as its beginning."""
    tokens = np.asarray(output.tokens)
    real = np.arange(tokens.shape[1])[None] < np.asarray(output.length)[:, None]
    return np.where(real, tokens, -1)


@jax.jit
def _gaps(
    target: EncoderDecoder,
    inputs: Array,
    mask: Array,
    keys: Array,
    tokens: Array,
    position: Array,
    chosen: Array,
    sampling: Sampling,
) -> Float[Array, " B"]:
    output, _ = target.decode(tokens, None, target.encode(inputs, mask))
    rows = jnp.arange(tokens.shape[0])
    logits = output.logits[rows, jnp.maximum(position - 1, 0)]
    prefix = Prefix(tokens=tokens, length=position[:, None])
    logits = sampling.edited(logits[:, None], prefix)[:, 0]
    scores = logits
    if sampling.temperature is not None:
        law = sampling.replace(controls=()).law(logits[:, None]).probs[:, 0]
        # What `autoregressive_generate` draws the token at a position with.
        own = fold_rows(fold_rows(keys, SAMPLE), position)
        temperature = jnp.broadcast_to(sampling.temperature, rows.shape)[:, None]
        clocks = jax.vmap(clock_speeds)(own, law)
        scores = jnp.where(temperature > 0, temperature * jnp.log(clocks), logits)
    scores = jnp.take_along_axis(scores, chosen, axis=1)
    return jnp.abs(scores[:, 0] - scores[:, 1])
