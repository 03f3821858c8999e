"""Training a target so that its own first layers draft well.

Layers that are left out at random, the later the likelier, keep the first ones from
leaving the work to the last, and a loss at an earlier layer, through the same norm and
head, makes an exit of each (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from specjax import errors
from specjax.models import t5


@dataclasses.dataclass(frozen=True)
class LayerSkip:
    """How a target is trained for early exits. Hashable, so that it can be static.

    Attributes:
        layer_dropout: chance that the last decoder layer is left out of a micro-batch,
            in [0, 1); it falls to 0 at the first, by LayerSkip's ``2**(l/(L-1)) - 1``.
        exit_loss: weight of the loss at one earlier layer, which each micro-batch
            draws, layer l (from 1) in proportion to l; at least 0.
    """

    layer_dropout: float = 0.0
    exit_loss: float = 0.0


def check_layer_skip(how: LayerSkip, layers: int, name: str) -> None:
    """Refuses settings that mean nothing.

    Args:
        how: the settings.
        layers: decoder layers of the model.
        name: how the caller names what holds them, for the message.

    Raises:
        errors.InputError: naming the setting.
    """
    if not 0 <= how.layer_dropout < 1:
        raise errors.InputError(
            f"{name}.layer_dropout is {how.layer_dropout}: a chance, in [0, 1)"
        )
    if not 0 <= how.exit_loss < math.inf:
        raise errors.InputError(
            f"{name}.exit_loss is {how.exit_loss}: a number, at least 0"
        )
    if how != LayerSkip() and layers < 2:
        raise errors.InputError(
            f"{name} asks for early exits and the model has {layers} decoder layer: it "
            "needs 2 or more"
        )


def drop_layers(model: t5.T5, layer_dropout: float, key: Key[Array, ""]) -> t5.T5:
    """The model with some decoder layers left out, for all rows alike.

    A layer whose outgoing matrices are zero adds nothing, and learns nothing.

    Args:
        model: of two decoder layers or more; it is not changed.
        layer_dropout: of the last layer.
        key: decides.
    """
    depth = len(model.decoder)
    rising = 2.0 ** (jnp.arange(depth) / (depth - 1)) - 1.0
    kept = jax.random.bernoulli(key, 1.0 - layer_dropout * rising)
    dropped: t5.T5 = jax.tree.map(lambda leaf: leaf, model)
    for number, block in enumerate(dropped.decoder):
        for part, name in (
            (block.attention, "out"),
            (block.cross, "out"),
            (block.feed_forward, "wo"),
        ):
            weight = getattr(part, name)[...]
            setattr(part, name, nnx.Param(weight * kept[number].astype(weight.dtype)))
    return dropped


def exit_logits(
    model: t5.T5, features: tuple[jax.Array, ...], key: Key[Array, ""]
) -> Float[Array, "B T V"]:
    """What the model says after one of its earlier decoder layers.

    Args:
        model: whose norm and head serve.
        features: outputs of all layers but the last, ``[B, T, D]`` each.
        key: chooses the layer.
    """
    weights = jnp.log(jnp.arange(1, len(features) + 1, dtype=jnp.float32))
    chosen = jax.random.categorical(key, weights)
    return model.logits(model.decoder_norm(jnp.stack(features)[chosen]))
