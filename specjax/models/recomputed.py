"""A model that makes its cross-attention's keys and values anew in every pass.

What a baseline costs that does not keep them: T5X's decoder calls cross-attention
without a cache, so that one verifying pass saves the projections of gamma steps.
Whoever measures speculation against such a baseline measures that too.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Bool, Int, Key

from specjax.models.base import Cache, DecoderOutput, Encoded


@struct.dataclass
class RecomputedCross:
    """The same function as `model`, and no keys and values in what `encode` gives.

    Attributes:
        model: a model that makes them in `decode` where ``encoded.cross`` is None.
    """

    model: Any

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return int(self.model.vocab_size)

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Runs the encoder alone."""
        encoded = self.model.encode(inputs, mask, dropout_key=dropout_key)
        return Encoded(hidden=encoded.hidden, mask=encoded.mask)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """The model's."""
        made: Cache = self.model.init_cache(batch_size, size)
        return made

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        encoded: Encoded,
        **settings: Any,
    ) -> tuple[DecoderOutput, Cache | None]:
        """Feeds tokens as the model does, after projecting the whole source once more.

        Args:
            tokens: see `EncoderDecoder.decode`, as for the rest.
            cache: of a loop, its state: so the projection depends on it, and no
                compiler can take it out of the loop.
            encoded: from `encode`.
            **settings: of the model's `decode`.
        """
        if cache is not None:
            hidden, length = jax.lax.optimization_barrier(
                (encoded.hidden, cache.length)
            )
            encoded = encoded.replace(hidden=hidden)
            cache = cache.replace(length=length)
        made: tuple[DecoderOutput, Cache | None] = self.model.decode(
            tokens, cache, encoded, **settings
        )
        return made

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """The model's."""
        kept: Cache = self.model.keep(cache, base, path)
        return kept
