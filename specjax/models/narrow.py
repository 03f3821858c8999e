"""What a part of some width reads of a T5 that may have been widened since.

A target that `models.widen` has made larger has the old residual stream in its first
columns. A trained part, such as an exit or a layer that drafts, keeps the width that it
was made for, and drafts for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.models.embedding import look_up
from specjax.models.t5 import T5
from specjax.models.t5_blocks import DecoderBlock, RMSNorm
from specjax.models.t5_config import T5Config

Module = TypeVar("Module")


def check_width(target: T5, width: int) -> None:
    """Refuses a target that is narrower than what drafts for it.

    Raises:
        InputError: it is.
    """
    if target.config.d_model < width:
        raise InputError(
            f"the drafter is made of layers of width {width} and the target's width is "
            f"{target.config.d_model}: it drafts for the target that it was trained "
            "for, or for that one widened"
        )


def embed(target: Any, ids: Int[Array, "B T"], width: int) -> Float[Array, "B T D"]:
    """The first columns of the tokens' embeddings."""
    return look_up(target.embedding[...], ids)[..., :width]


def head_logits(target: Any, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The target's raw logits, float32, of hidden states after a norm of their width.

    They are fed to the whole head, whose other columns meet zeros, so that it costs
    what it costs the target.
    """
    width, wide = hidden.shape[-1], target.config.d_model
    if width == wide:
        return target.logits(hidden)
    if target.config.scaled_head:  # by its own width, which is not this one
        hidden = hidden * jnp.asarray(math.sqrt(wide / width), hidden.dtype)
    edges = [(0, 0)] * (hidden.ndim - 1) + [(0, wide - width)]
    return target.logits(jnp.pad(hidden, edges))


def made_for(target: T5, shape: Mapping[str, Any] | None) -> T5Config:
    """The shape that trained layers have.

    Args:
        target: that they draft for.
        shape: fields of a `T5Config`, that of their own target before it was widened;
            None: the target's own.

    Raises:
        InputError: they are no such fields, or are wider than the target.
    """
    if shape is None:
        return target.config
    try:
        config = T5Config(**shape)
    except TypeError as error:
        raise InputError(f"shape is {shape!r}, no T5Config ({error})") from error
    check_width(target, config.d_model)
    return config


def copy_norm(target: T5, config: T5Config) -> RMSNorm:
    """The target's final norm in memory of its own; a new one of another shape.

    Args:
        target: a T5.
        config: from `made_for`.
    """
    if config != target.config:
        return _like(target, RMSNorm(config))
    return _like(target, target.decoder_norm)


def copy_layer(
    target: T5, number: int, config: T5Config, key: Key[Array, ""]
) -> DecoderBlock:
    """A decoder layer of the target in memory of its own; a new one of another shape.

    It has a bias table, if need be that of layer 0, which serves all.

    Args:
        target: a T5.
        number: of its layer.
        config: from `made_for`.
        key: of a new one.
    """
    if config != target.config:
        return _like(target, DecoderBlock(config, key, has_bias=True))
    copied = _like(target, target.decoder[number])
    if copied.attention.bias is None:
        table = target.decoder[0].attention.bias
        assert table is not None  # layer 0 always has one
        # Said outright: what was None when the layer was made counts as a setting.
        copied.attention.bias = nnx.data(nnx.Param(jnp.array(table[...], copy=True)))
    return copied


def _like(target: T5, module: Module) -> Module:
    """A copy, in the target's type."""
    copied: Module = jax.tree.map(
        lambda x: jnp.array(x, dtype=target.dtype, copy=True), module
    )
    return copied
