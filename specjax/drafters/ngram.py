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
from specjax.drafters.matching import (
    Sources,
    check_longest,
    copied_block,
    has_next,
    last_tokens,
    match_lengths,
    source_and_output,
    what_followed,
)
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise


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
    ) -> Sources:
        """Keeps the sources.

        Raises:
            InputError: `max_ngram` is below 1, or longer than any text can get.
        """
        check_longest(self.max_ngram, "max_ngram", size)
        return Sources(inputs=inputs, mask=mask)

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: Sources,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, Sources]:
        """Copies up to `gamma` tokens; draws nothing."""

        def row(
            inputs: Array, mask: Array, tokens: Array, length: Array
        ) -> tuple[Array, Array]:
            return _lookup(inputs, mask, tokens, length, gamma, self.max_ngram)

        drafted, drafted_length = jax.vmap(row)(
            state.inputs, state.mask, tokens, length
        )
        return copied_block(drafted, drafted_length), state

    def commit(self, state: Sources, committed: Committed) -> Sources:
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
    """One row's copied tokens and how many of them are real."""
    text, position = source_and_output(inputs, mask, tokens, length)
    matched = match_lengths(text, position, last_tokens(tokens, length, max_ngram))
    place = jnp.arange(text.shape[0])
    found = (matched > 0) & has_next(position)
    # The output stands after the source: of equal matches the latest wins.
    best = jnp.argmax(jnp.where(found, matched * text.shape[0] + place, -1))
    copied = what_followed(text, position, best, gamma)
    return copied, jnp.where(found[best], jnp.sum(copied >= 0), 0)
