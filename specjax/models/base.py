"""What a target or a draft model must offer, and the records that it hands around."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key


@struct.dataclass
class Encoded:
    """The encoder's result: constant while a row is decoded, hence not part of `Cache`.

    Attributes:
        hidden: ``[B, S, D]`` encoder output.
        mask: ``bool[B, S]`` True at real source tokens.
        cross: cross-attention keys and values of every decoder layer, in the model's
            own layout; None: computed anew at each decode call (saves memory).
    """

    hidden: Float[Array, "B S D"]
    mask: Bool[Array, "B S"]
    cross: Any = None


@struct.dataclass
class Cache:
    """Decoder self-attention memory with a length per row.

    Slots from ``length[b]`` on are invisible and get overwritten, so a row is rolled
    back by ``cache.replace(length=...)`` alone.

    Attributes:
        memory: keys and values, in the model's own layout.
        length: ``int32[B]`` number of valid slots.
    """

    memory: Any
    length: Int[Array, " B"]


@struct.dataclass
class DecoderOutput:
    """What one decoder pass gives.

    Attributes:
        logits: ``float32[B, T, V]`` raw logits after each fed token.
        features: one ``[B, T, D]`` per requested tap.
    """

    logits: Float[Array, "B T V"]
    features: tuple[jax.Array, ...] = ()


class EncoderDecoder(Protocol):
    """The contract between decoding and a model. Decoding never imports a model.

    A draft may do without an encoder and read the target's: see `encode_draft`.
    """

    @property
    def vocab_size(self) -> int:
        """Rows of the head, dead padding rows included."""
        ...

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Runs the encoder and the decoder's cross-attention projections, once."""
        ...

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """An empty cache of `size` slots per row."""
        ...

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        encoded: Encoded,
        *,
        parents: Int[Array, "B M"] | None = None,
        start: int = 0,
        taps: tuple[int, ...] = (),
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[DecoderOutput, Cache | None]:
        """Feeds T tokens per row.

        Token t of row b goes to slot ``cache.length[b] + t``; the returned cache has
        length + T. ``cache=None`` is teacher forcing: nothing is kept. `taps` are
        static layer numbers whose output is wanted (-1: after the final norm).

        With `parents` the tokens are nodes ``start .. start + T - 1`` of a tree (see
        `specjax.trees`) whose first `start` nodes earlier calls have fed, so that node
        i takes slot ``base + i`` with ``base = cache.length - start``. It stands at
        position ``base + depth(i)`` and sees the slots below `base`, its ancestors and
        itself.
        """
        ...

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """Makes a path of a tree contiguous: slot base + path[j] goes to base + 1 + j.

        The caller sets the length; slots past it need no sense.
        """
        ...


def encode_draft(
    model: EncoderDecoder,
    encoded: Encoded,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> Encoded:
    """What a draft model decodes from: its own encoder's result, or the target's.

    A model shares the target's encoder if it says so by `shares_encoder`; then
    ``encode_shared(encoded)`` makes the target's result its own.

    Args:
        model: the draft.
        encoded: the target's.
        inputs: source ids.
        mask: True at real source tokens.
    """
    # Asked so, because a model that has an encoder need not know of the choice.
    if getattr(model, "shares_encoder", False):
        return model.encode_shared(encoded)  # type: ignore[attr-defined]
    return model.encode(inputs, mask)
