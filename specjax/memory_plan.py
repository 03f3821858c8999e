"""What each device of a mesh holds while a pair decodes, from shapes alone.

Weights are counted parameter by parameter, by the rules that place them
(`specjax.sharding`); the rest by its formula. What XLA needs besides, for a layer's
work, is taken to be the largest layer's, once; the program itself is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from specjax.errors import InputError
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.roofline import ITEM_BYTES
from specjax.sharding import (
    DATA,
    DECODING,
    MODEL,
    REPLICATED,
    Layout,
    check_heads,
    shard_shape,
)

TPU_LANES = 128

_WIDE = 4  # laws, logits and scores are float32 whatever the rest is


@dataclasses.dataclass(frozen=True)
class Decode:
    """What is decoded at once.

    Attributes:
        batch: rows, of all devices together.
        source: tokens of each source, padding included.
        length: decoder tokens, prefix included.
        gamma: most tokens drafted per target call; 0: the target decodes alone.
        greedy: whether no law is kept, but its best token.
    """

    batch: int
    source: int
    length: int
    gamma: int
    greedy: bool = True

    @property
    def slots(self) -> int:
        """Of each row's memory: a block more than the output."""
        return self.length + self.gamma + 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on each device.

    Attributes:
        target_weights: the target's parameters.
        draft_weights: the draft's.
        self_attention: keys and values of both, of all slots.
        cross_attention: keys and values of the sources, of both.
        hidden: the encoders' outputs.
        laws: probabilities and logits of a block.
        activations: of the largest layer at work.
    """

    target_weights: int
    draft_weights: int
    self_attention: int
    cross_attention: int
    hidden: int
    laws: int
    activations: int

    @property
    def bytes(self) -> int:
        """All together."""
        return sum(dataclasses.asdict(self).values())


def weight_bytes(
    config: T5Config, dtype: str, sizes: Mapping[str, int], layout: Layout = DECODING
) -> int:
    """Bytes of a model's parameters on one device.

    Args:
        config: the shape.
        dtype: of the parameters: "float32" or "bfloat16".
        sizes: devices of each axis of the mesh.
        layout: what the axes split.

    Raises:
        InputError: an axis does not divide what it would split.
    """
    shapes = jax.eval_shape(lambda: T5(config, jax.random.key(0)))
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = jax.tree_util.keystr(path)
        total += math.prod(shard_shape(name, leaf.shape, sizes, layout))
    return total * ITEM_BYTES[dtype]


def plan(
    target: T5Config,
    draft: T5Config | None,
    dtype: str,
    sizes: Mapping[str, int],
    decode: Decode,
    *,
    split_draft: bool = False,
    lanes: int = 1,
) -> Plan:
    """What a device holds.

    Args:
        target: its shape.
        draft: its shape; None: none drafts, or no model does.
        dtype: of weights, caches and activations: "float32" or "bfloat16".
        sizes: devices of each axis of the mesh, of which one may be left out.
        decode: what is decoded.
        split_draft: over the mesh's `model` axis as the target is; else each device
            has all of it.
        lanes: numbers that the device lays out side by side, whole: a TPU pads the
            last axis of a cache, d_kv, to a multiple of `TPU_LANES`.

    Raises:
        InputError: a type or a number means nothing, or the mesh does not divide the
            rows, the heads, or a matrix.

    >>> xxl, small = (T5Config.preset(f"t5-v1_1-{size}") for size in ("xxl", "small"))
    >>> decode = Decode(batch=1, source=128, length=128, gamma=7)
    >>> on_four = plan(xxl, small, "bfloat16", {"model": 4}, decode)
    >>> round(on_four.target_weights / 1e9, 1), round(on_four.bytes / 1e9, 1)
    (5.6, 5.8)
    """
    if dtype not in ITEM_BYTES:
        raise InputError(f"dtype is {dtype!r}: one of {', '.join(ITEM_BYTES)}")
    sizes = {DATA: 1, MODEL: 1, **sizes}
    for name, least in (("batch", 1), ("source", 1), ("length", 2), ("gamma", 0)):
        value = getattr(decode, name)
        if value < least:
            raise InputError(f"{name} is {value}: at least {least}")
    if decode.batch % sizes[DATA]:
        raise InputError(
            f"the mesh's {DATA}={sizes[DATA]} does not divide the {decode.batch} rows"
        )
    rows = decode.batch // sizes[DATA]
    parts = [_Part(target, sizes[MODEL], DECODING, lanes)]
    if draft is not None:
        own = (sizes[MODEL], DECODING) if split_draft else (1, REPLICATED)
        parts.append(_Part(draft, *own, lanes))
    for role, part in zip(("target", "draft"), parts, strict=False):
        check_heads(part.config.num_heads, {MODEL: part.over}, role)
    size = ITEM_BYTES[dtype]
    weights = [weight_bytes(p.config, dtype, sizes, p.layout) for p in parts]
    return Plan(
        target_weights=weights[0],
        draft_weights=sum(weights[1:]),
        self_attention=sum(p.per_slot * rows * decode.slots * size for p in parts),
        cross_attention=sum(p.per_slot * rows * decode.source * size for p in parts),
        hidden=sum(rows * decode.source * p.config.d_model * size for p in parts),
        laws=_laws(parts, decode, rows),
        activations=max(p.at_work(rows, decode.source, size) for p in parts),
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """A model, and over how many devices its units are split."""

    config: T5Config
    over: int
    layout: Layout
    lanes: int

    @property
    def per_slot(self) -> int:
        """Numbers that one token of one row keeps, in all decoder layers."""
        config = self.config
        heads = config.num_heads // self.over
        laid_out = -(-config.d_kv // self.lanes) * self.lanes
        return 2 * config.num_decoder_layers * heads * laid_out

    def at_work(self, rows: int, source: int, size: int) -> int:
        """Bytes of one encoder layer's work: the most that a pass has at once."""
        config = self.config
        entry = config.d_ff * (2 if config.gated else 1) // self.over
        hidden = rows * source * (2 * config.d_model + entry) * size
        scores = 2 * rows * config.num_heads // self.over * source * source * _WIDE
        attention = 3 * config.d_attention // self.over + 2 * config.d_model
        return max(hidden, scores + rows * source * attention * size)


def _laws(parts: list[_Part], decode: Decode, rows: int) -> int:
    """Logits of the target's block; laws of both, unless the best token will do."""
    target, fed = parts[0], decode.gamma + 1
    own = rows * fed * target.config.vocab_size // target.over * _WIDE
    if decode.greedy:
        return own
    drafted = rows * decode.gamma * target.config.vocab_size * _WIDE
    return 2 * own + drafted * (len(parts) > 1)
