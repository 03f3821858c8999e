"""A larger T5 that computes what a small one does: the costs alone are the larger's.

Text, probabilities and acceptance of a small trained pair can then be measured at the
time and memory traffic of any published size, without that size's weights. The two are
the same function, up to rounding, for these reasons:

- **The residual stream's new columns stay zero.** Nothing writes to them: new columns
  of the embedding are zero, and so are new rows of each matrix that ends in the stream.
  What reads them may therefore hold anything, and is random.
- **Norms.** The mean square over D' columns is D/D' of that over the D old ones. With
  eps D/D' as large the norm gives sqrt(D'/D) times too much, which its weight takes
  back. Before a scaled head the final norm keeps its weight: the head's own D'**-0.5
  does it.
- **New heads and hidden units** read at random and write through zeros. In an old head
  the new part of the keys is zero (T5 does not divide by sqrt(d_kv)), and the new part
  of the values is read by zeros.
- **New layers** come after the old ones, since block 0 owns the bias table; their
  outputs are zero.
- **New rows of the vocabulary** are random. They are padding, to be ruled out by
  `Sampling.num_tokens`.

Features of the larger model, for drafters that were made for the small one: its layers
keep their numbers. Tap i >= 0 has the small model's features of layer i in its first D
columns and zeros in the others; new layers repeat the last old one. Tap -1, after the
final norm, and the logits' input has them in its first D columns too, times sqrt(D'/D)
where ``scaled_head`` is set, and as they are otherwise. The encoder's output has the
small model's in its first D columns, and zeros: so a draft that reads its target's
encoder can be widened with its target, `encoder_width` being the target's new width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from specjax.errors import InputError
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

_KEPT = (
    "gated",
    "activation",
    "tied_head",
    "scaled_head",
    "bias_per_layer",
    "num_buckets",
    "max_distance",
    "pad_id",
    "eos_id",
)
_GROWING = (
    "vocab_size",
    "d_model",
    "d_kv",
    "num_heads",
    "d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_width",
)
# Parameters with an axis of all heads, second to last or last; where keys are fused
# with others, their index on axis 0.
_INTO_HEADS = {"qkv": 1, "kv": 0, "q": None}
_FROM_HEADS = "out"


def widened_config(config: T5Config, preset: T5Config) -> T5Config:
    """The shape of a model that is widened to the cost of `preset`.

    Width, depth, hidden units and vocabulary are the preset's. What decides the model's
    function stays the model's: gating (an ungated layer keeps the preset's `d_ff`, and
    so has two of its three matrices), activation, head, bias tables, special ids. Where
    the model has more heads than the preset, or wider ones, it keeps them, and the
    other factor is as small as gives the heads together the preset's width: eight heads
    of 32 go to eight of 48 for a preset of six of 64. `eps` is D/D' times the model's.

    Args:
        config: of the model.
        preset: the shape whose cost is wanted, such as ``T5Config.preset(name)``.

    Returns:
        the shape for `widen`, which refuses it if the preset is smaller than the model.
        A draft that reads its target's encoder keeps `encoder_width`: if the target is
        widened too, replace it by the target's new width.
    """
    heads, d_kv = preset.num_heads, preset.d_kv
    if config.num_heads > heads:
        heads = config.num_heads
        d_kv = -(-preset.d_attention // heads)
    if config.d_kv > d_kv:
        d_kv = config.d_kv
        heads = max(config.num_heads, -(-preset.d_attention // d_kv))
    shares_encoder = config.encoder_width is not None
    return dataclasses.replace(
        config,
        vocab_size=preset.vocab_size,
        d_model=preset.d_model,
        d_kv=d_kv,
        num_heads=heads,
        d_ff=preset.d_ff,
        num_encoder_layers=0 if shares_encoder else preset.num_encoder_layers,
        num_decoder_layers=preset.num_decoder_layers,
        eps=_eps(config, preset.d_model),
    )


def widen(model: T5, config: T5Config, key: Key[Array, ""]) -> T5:
    """A T5 of a larger shape with the function of `model`; see the module's docstring.

    Random weights have the scale of a new T5's. All layers share their values, which
    nothing depends on, but not their memory.

    Args:
        model: of any family; its dtype is the result's. In bfloat16 the two differ by
            that type's rounding.
        config: the larger shape, as of `widened_config`.
        key: of the random weights.

    Raises:
        InputError: a field of `config` is smaller than the model's, or differs where it
            must not.
    """
    small = model.config
    _check(small, config)
    graph, state = nnx.split(jax.eval_shape(lambda: T5(config, jax.random.key(0))))
    # One layer of each kind: to draw them all would take most of the time.
    single = dataclasses.replace(
        config,
        num_encoder_layers=min(1, config.num_encoder_layers),
        num_decoder_layers=1,
    )
    fresh = nnx.to_pure_dict(
        nnx.state(jax.jit(T5, static_argnums=0)(single, key), nnx.Param)
    )
    old = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    narrower = math.sqrt(small.d_model / config.d_model)

    def leaf(path: Any, _: Any) -> jax.Array:
        names = [step.key for step in path]
        scaled = names[-1] == "scale" and not (
            names[0] == "decoder_norm" and config.scaled_head
        )
        return _grow(
            _find(old, names),
            _find(fresh, [0 if isinstance(name, int) else name for name in names]),
            name=names[-1],
            small=small,
            large=config,
            factor=narrower if scaled else 1.0,
            dtype=model.dtype,
        )

    leaves = jax.tree_util.tree_map_with_path(leaf, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)


@functools.partial(
    jax.jit, static_argnames=("name", "small", "large", "factor", "dtype")
)
def _grow(
    old: jax.Array | None,
    fresh: jax.Array,
    *,
    name: str,
    small: T5Config,
    large: T5Config,
    factor: float,
    dtype: DTypeLike,
) -> jax.Array:
    """One parameter of the larger shape.

    Args:
        old: the small model's; None in a new layer.
        fresh: a random one of the larger shape.
        name: the last part of its path.
        small, large: the two shapes.
        factor: of the old values.
        dtype: of the result.
    """
    values = fresh.astype(dtype)
    if name in ("out", "wo"):
        values = jnp.zeros_like(values)
    elif name == "embedding":
        values = values.at[:, small.d_model :].set(0.0)
    elif name == "projection":
        values = values.at[small.d_model :].set(0.0)
    if old is None:
        return jnp.copy(values)  # `fresh` itself may serve several layers
    values = _by_head(values, name, large)
    old = _by_head((factor * old.astype(jnp.float32)).astype(dtype), name, small)
    if (keys := _INTO_HEADS.get(name)) is not None:
        values = values.at[keys, : small.num_heads, small.d_kv :].set(0.0)
    corner = tuple(slice(size) for size in old.shape)
    return values.at[corner].set(old).reshape(fresh.shape)


def _by_head(x: jax.Array, name: str, config: T5Config) -> jax.Array:
    """Splits the axis of all heads in two, if the parameter has one."""
    heads = (config.num_heads, config.d_kv)
    if name in _INTO_HEADS:
        return x.reshape(*x.shape[:-2], *heads, x.shape[-1])
    return x.reshape(*x.shape[:-1], *heads) if name == _FROM_HEADS else x


def _find(tree: Any, names: list[Any]) -> Any:
    """The leaf at a path, or None."""
    for name in names:
        if name not in tree:
            return None
        tree = tree[name]
    return tree


def _eps(config: T5Config, width: int) -> float:
    return config.eps * config.d_model / width


def _check(small: T5Config, large: T5Config) -> None:
    for name in _KEPT:
        own, other = getattr(small, name), getattr(large, name)
        if own != other:
            raise InputError(
                f"a model with {name} {own!r} cannot be widened to a shape with {name} "
                f"{other!r}: it must stay the same"
            )
    for name in _GROWING:
        own, other = getattr(small, name), getattr(large, name)
        if (own is None) != (other is None) or (own is not None and other < own):
            raise InputError(
                f"a model with {name} {own} cannot be widened to a shape with {name} "
                f"{other}: nothing may become smaller"
            )
    eps = _eps(small, large.d_model)
    if not math.isclose(large.eps, eps, rel_tol=1e-6):
        raise InputError(
            f"a model of width {small.d_model} with eps {small.eps:g} computes the "
            f"same at width {large.d_model} with eps {eps:g}, not {large.eps:g}: take "
            "the shape from widened_config"
        )
