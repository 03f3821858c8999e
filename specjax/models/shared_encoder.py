"""A draft that shares its target's encoder, and the target: together a whole model."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Int, Key

from specjax.errors import InputError
from specjax.models.base import Cache, DecoderOutput, Encoded, EncoderDecoder
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config


@struct.dataclass
class SharedEncoderDraft:
    """An `EncoderDecoder` that encodes with the target and decodes with the draft.

    For what looks at a draft by itself: its loss, its own text, its alpha. The draft
    alone is what is trained and saved, and what `ModelDrafter` takes, which gets the
    target's encoder output for nothing.

    Attributes:
        draft: a T5 with ``config.encoder_width``.
        target: the model whose encoder it reads.
    """

    draft: T5
    target: EncoderDecoder

    @property
    def config(self) -> T5Config:
        """The draft's."""
        return self.draft.config

    @property
    def vocab_size(self) -> int:
        """The draft's."""
        return self.draft.vocab_size

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Runs the target's encoder, without dropout, and the draft's projection."""
        encoded = self.target.encode(inputs, mask)
        return self.draft.encode_shared(encoded, dropout_key=dropout_key)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """The draft's."""
        return self.draft.init_cache(batch_size, size)

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        encoded: Encoded,
        **options: Any,
    ) -> tuple[DecoderOutput, Cache | None]:
        """The draft's; `options` as in `T5.decode`."""
        return self.draft.decode(tokens, cache, encoded, **options)

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """The draft's."""
        return self.draft.keep(cache, base, path)


def whole(draft: T5, target: T5 | None) -> T5 | SharedEncoderDraft:
    """The draft as a model that can encode: itself, or together with its target.

    Args:
        draft: any T5.
        target: used only where the draft shares its encoder.

    Raises:
        InputError: it does, and no target is given or one of another width.
    """
    if not draft.shares_encoder:
        return draft
    if target is None:
        raise InputError(
            "the draft reads the encoder of a target of width "
            f"{draft.config.encoder_width}: name the target too"
        )
    draft.check_encoder_width(target.config.d_model)
    return SharedEncoderDraft(draft=draft, target=target)
