"""Drafts that start as a part of their target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import errors
from specjax.models import t5


def draft_from_target(
    target: t5.T5, encoder_layers: Sequence[int], decoder_layers: Sequence[int]
) -> t5.T5:
    """A draft of the target's width made of some of its layers.

    The embedding, the head and the final norms are the target's. So is the relative
    bias of layer 0, which in most of the family serves all layers; in umT5 each layer
    keeps its own. First and last layers are a good choice (Shleifer and Rush 2020,
    arXiv:2010.13002).

    Without encoder layers the draft reads the target's encoder, through a projection
    that starts as the identity: with all decoder layers it is the target itself
    (decoder layers of one encoder: Gandhi et al. 2023, arXiv:2311.00430).

    Args:
        target: its arrays are copied, so that either model may be donated.
        encoder_layers: numbers of the target's layers, from 0, in the draft's order;
            () shares the encoder.
        decoder_layers: the same, at least one.

    Raises:
        errors.InputError: a number names no layer of the target, there is no decoder
            layer, or the target itself has no encoder.
    """
    if target.shares_encoder:
        raise errors.InputError(
            "the target has no encoder of its own, so no draft can be made of it"
        )
    layers = {"encoder": tuple(encoder_layers), "decoder": tuple(decoder_layers)}
    for stack, chosen in layers.items():
        _check_layers(stack, chosen, len(getattr(target, stack)))
    if not layers["decoder"]:
        raise errors.InputError("decoder_layers is empty: a draft has at least one")
    config = dataclasses.replace(
        target.config,
        num_encoder_layers=len(layers["encoder"]),
        num_decoder_layers=len(layers["decoder"]),
        encoder_width=None if layers["encoder"] else target.config.d_model,
    )
    graph, state = nnx.split(jax.eval_shape(lambda: t5.T5(config, jax.random.key(0))))
    whole = nnx.to_pure_dict(nnx.state(target, nnx.Param))
    part = nnx.to_pure_dict(state)
    for name in part:
        if name in layers:
            part[name] = _stack(whole[name], layers[name], config.bias_per_layer)
        elif name == "projection":
            part[name] = jnp.eye(config.d_model, dtype=target.dtype)
        else:
            part[name] = whole[name]
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.copy, part))
    return nnx.merge(graph, state)


def _check_layers(stack: str, chosen: tuple[int, ...], available: int) -> None:
    for layer in chosen:
        if not errors.is_whole(layer):
            raise errors.InputError(
                f"{stack}_layers holds {layer!r}: whole numbers, the target's layers"
            )
        if not 0 <= layer < available:
            raise errors.InputError(
                f"{stack}_layers names layer {layer}: the target's {stack} has layers "
                f"0 to {available - 1}"
            )


def _stack(
    blocks: dict[int, Any], chosen: tuple[int, ...], bias_per_layer: bool
) -> dict[int, Any]:
    """The chosen blocks, renumbered; where one table serves all, the first gets it."""
    part = {}
    for place, layer in enumerate(chosen):
        block = dict(blocks[layer])
        if not bias_per_layer:
            attention = dict(block["attention"])
            attention.pop("bias", None)
            if place == 0:
                attention["bias"] = blocks[0]["attention"]["bias"]
            block["attention"] = attention
        part[place] = block
    return part
