"""The target's own decoder in 8-bit whole numbers as the draft.

It drafts nearly as the target writes and costs a pass over all of its layers, so that
it can win only where a pass takes the time of reading its weights: on an accelerator,
where a float32 target's decoder is read at a quarter of the bytes, a bfloat16 one's at
half. On a CPU, which converts each weight before it multiplies, expect it to lose.

Self-speculation with a quantised copy: QSpec (arXiv:2410.11305); scales by output
channel as in Dettmers et al. 2022 (arXiv:2208.07339).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from specjax.errors import InputError
from specjax.models.base import Encoded
from specjax.models.dense import Int8
from specjax.models.t5 import T5


class QuantizedT5(T5):
    """A T5's decoder with its products in `Int8`; reads the encoder's result as it is.

    Embedding, head and projections are whole numbers; norms and relative biases stay.
    Cross-attention's keys and values are the target's own, made once per source: they
    cost no pass and no memory, and are exact.

    Args:
        target: its arrays are not changed.
    """

    def __init__(self, target: T5):
        # Not as a T5, which starts from random numbers.
        own = nnx.merge(*nnx.split(target))
        width = target.config.d_model
        self.config = dataclasses.replace(
            target.config, num_encoder_layers=0, encoder_width=width
        )
        self.encoder = nnx.List([])
        self.encoder_norm = self.projection = None
        self.embedding, self.head = own.embedding, own.head
        self.decoder, self.decoder_norm = own.decoder, own.decoder_norm
        for name in ("embedding", "head"):
            _quantize(self, name)
        for block in self.decoder:
            block.cross.kv = None  # type: ignore[assignment]
            for layer, names in (
                (block.attention, ("qkv", "out")),
                (block.cross, ("q", "out")),
                (block.feed_forward, ("wi", "wo")),
            ):
                for name in names:
                    _quantize(layer, name)

    @property
    def shares_encoder(self) -> bool:
        """It has no encoder."""
        return True

    def encode_shared(
        self, encoded: Encoded, *, dropout_key: Key[Array, ""] | None = None
    ) -> Encoded:
        """The target's result itself.

        Args:
            encoded: the target's.
            dropout_key: must be None: whole numbers are not trained.

        Raises:
            InputError: the result is of another width, or without cross-attention's
                keys and values.
        """
        if dropout_key is not None:
            raise InputError("a quantised draft is not trained: it has no dropout")
        self.check_encoder_width(encoded.hidden.shape[-1])
        if encoded.cross is None:
            raise InputError(
                "a quantised draft reads the keys and values that the target's encode "
                "makes, and there are none: give it the result of encode"
            )
        return encoded


def _quantize(module: Any, name: str) -> None:
    if getattr(module, name) is not None:
        setattr(module, name, nnx.Param(Int8.of(getattr(module, name)[...])))


def quantize(model: T5) -> QuantizedT5:
    """A target as its own draft, for `ModelDrafter` and `TreeDrafter`.

    Args:
        model: the target, with an encoder of its own.

    Raises:
        InputError: it has none.
    """
    if model.shares_encoder:
        raise InputError(
            "the model has no encoder of its own, so it is no target: quantize the one "
            "that it drafts for"
        )
    draft: QuantizedT5 = jax.jit(QuantizedT5)(model)
    return draft


def weight_bytes(model: Any) -> int:
    """Bytes of all arrays of a model, or of a part of one.

    A decoder step reads all of a decoder but its embedding, of which it reads a row.
    """
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))
