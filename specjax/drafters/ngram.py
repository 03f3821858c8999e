"""Copies what followed the latest longest match, in the source or in the output so far.

Prompt lookup (Saxena 2023) and LLMA (Yang et al. 2023, arXiv:2304.04487), with the
encoder's input as the first place to look: an encoder-decoder's prompt is its source.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.drafters.base import Committed
from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law, Noise


@struct.dataclass
class NgramDraftState:
    """The source, as something to copy from. Nothing is learned between calls.

    Attributes:
        inputs: ``int32[B, S]`` source ids.
        mask: ``bool[B, S]`` True at real source tokens.
    """

    inputs: Int[Array, "B S"]
    mask: Bool[Array, "B S"]


@struct.dataclass
class NgramDrafter:
    """Looks up the last tokens and copies what followed them.

    The longest match wins, up to `max_ngram` tokens; among equals the latest, where the
    output so far counts as later than the source. The decoder's start token counts as
    standing before the source, so that the first draft is the source's own beginning.
    The draft ends where the copied text ends; without a match it is empty. Its law is
    one-hot, so that a rejection rule accepts a copied token x with probability p(x).

    Attributes:
        max_ngram: tokens of the longest match that is looked for (static).
    """

    max_ngram: int = struct.field(pytree_node=False, default=3)

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def nodes(self, gamma: int) -> int:
        """A chain."""
        return gamma

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> NgramDraftState:
        """Keeps the sources."""
        if self.max_ngram < 1:
            raise InputError(f"max_ngram is {self.max_ngram}: it must be at least 1")
        return NgramDraftState(inputs=inputs, mask=mask)

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: NgramDraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, NgramDraftState]:
        """Copies up to `gamma` tokens; draws nothing."""

        def row(
            inputs: Array, mask: Array, tokens: Array, length: Array
        ) -> tuple[Array, Array]:
            return _lookup(inputs, mask, tokens, length, gamma, self.max_ngram)

        drafted, drafted_length = jax.vmap(row)(
            state.inputs, state.mask, tokens, length
        )
        ids = drafted[..., None]
        law = Law(probs=jnp.ones(ids.shape, jnp.float32), ids=ids)
        return DraftBlock(tokens=drafted, length=drafted_length, law=law), state

    def commit(self, state: NgramDraftState, committed: Committed) -> NgramDraftState:
        """Nothing to bring in step."""
        return state


def _lookup(
    inputs: Int[Array, " S"],
    mask: Bool[Array, " S"],
    tokens: Int[Array, " L"],
    length: Int[Array, ""],
    gamma: int,
    max_ngram: int,
) -> tuple[Int[Array, " G"], Int[Array, ""]]:
    """One row's copied tokens and how many of them are real.

    text    [start, source .............., output ...............]
    place    0      1 .. S                 S+1 .. S+length
    """
    source_length = inputs.shape[0]
    text = jnp.concatenate([tokens[:1], inputs, tokens])
    written = jnp.arange(tokens.shape[0]) < length
    real = jnp.concatenate([jnp.ones(1, bool), mask, written])
    place = jnp.arange(text.shape[0])
    in_output = place > source_length

    def looking_back(array: Array, steps: int) -> Array:
        return jnp.concatenate([jnp.zeros(steps, array.dtype), array])[: place.shape[0]]

    # matched[e]: how many of the last tokens, counted backwards, stand up to place e.
    matched = jnp.zeros_like(place)
    alive = real
    for back in range(max_ngram):
        wanted = tokens[jnp.maximum(length - 1 - back, 0)]
        same_part = looking_back(in_output, back) == in_output
        alive = alive & (looking_back(text, back) == wanted) & same_part
        alive = alive & looking_back(real, back) & (back < length) & (place >= back)
        matched = matched + alive.astype(matched.dtype)
    # What follows a place must be real and of the same part.
    same_as_next = jnp.append(in_output[1:] == in_output[:-1], False)
    follows = jnp.append(real[1:], False) & same_as_next
    score = jnp.where(follows & (matched > 0), matched * place.shape[0] + place, -1)
    best = jnp.argmax(score)
    copied = best + 1 + jnp.arange(gamma)
    inside = copied < text.shape[0]
    copied = jnp.minimum(copied, text.shape[0] - 1)
    usable = inside & real[copied] & (in_output[copied] == in_output[best])
    count = jnp.sum(jnp.cumprod(usable, dtype=jnp.int32))
    return text[copied], jnp.where(score[best] >= 0, count, 0)
