"""A T5's decoder in jax alone, of made-up weights, its layers scanned or written out.

For `experiments.gpu_check`, whose machine may have nothing but jax. Scanned layers are
compiled once; written out, they need no slices of stacked weights, which some compilers
copy before they multiply.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SLOTS, SOURCE = 136, 128  # of a cache, and of a source
_SHARPNESS = 6.0  # standard deviation of logits: a law with a few likely ids
_NOISE = 0.15  # of all layers together, beside the embedding that they add to

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder of T5 1.1."""

    width: int
    heads: int
    head: int
    hidden: int
    layers: int
    vocab: int = 32128

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head

    def bytes(self, batch: int = 1) -> int:
        """Read by a step in bfloat16: weights, and keys and values of all slots."""
        layer = 6 * self.width * self.inner + 3 * self.width * (self.hidden + 1)
        memory = 2 * batch * self.inner * (SLOTS + SOURCE)
        head = self.width * (self.vocab + 1)
        return 2 * (self.layers * (layer + memory) + head)


def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return _scaled(key, jnp.asarray(scale, jnp.bfloat16), shape)


@functools.partial(jax.jit, static_argnums=2)
def _scaled(key: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * scale


def make_weights(shape: Shape, core: int, seed: int) -> Weights:
    """Weights of a decoder, made on the device an array at a time.

    Args:
        shape: of the decoder.
        core: columns that hold the law of the last token, as in all other models.
        seed: of the rest.
    """
    own = iter(jax.random.split(jax.random.key(seed), 6 * shape.layers + 2))
    common = iter(jax.random.split(jax.random.key(7), 2))
    width, inner, hidden, vocab = shape.width, shape.inner, shape.hidden, shape.vocab
    # The embedding's root mean square is (core / width)**.5; all that is added to it
    # together has _NOISE of it.
    added = _NOISE * (core / width / (3 * shape.layers)) ** 0.5
    ones = jnp.ones(width, jnp.bfloat16)

    def layer() -> Weights:
        return {
            "qkv": _normal(next(own), (3 * inner, width), width**-0.5),
            "out": _normal(next(own), (width, inner), added * inner**-0.5),
            "query": _normal(next(own), (inner, width), width**-0.5),
            "cross": _normal(next(own), (width, inner), added * inner**-0.5),
            "wi": _normal(next(own), (2 * hidden, width), width**-0.5),
            "wo": _normal(next(own), (width, hidden), added * hidden**-0.5),
            "norms": jnp.ones((3, width), jnp.bfloat16),
        }

    layers = tuple(layer() for _ in range(shape.layers))
    embedding = _normal(next(common), (vocab, core), 1.0)
    scale = _SHARPNESS * width**-0.5
    head = _normal(next(common), (vocab, core), 1.0) * jnp.asarray(scale, jnp.bfloat16)
    more = ((0, 0), (0, width - core))
    rest = _normal(next(own), (vocab, width - core), scale)
    return {
        "layers": layers,
        "embedding": jnp.pad(embedding, more),
        "head": jnp.concatenate([head, rest], axis=1),
        "norm": ones,
        "bias": _normal(next(own), (32, shape.heads), 0.1),
    }


def stacked(weights: Weights) -> Weights:
    """The same with layers in one array each, to be scanned."""
    layers = jax.tree.map(lambda *own: jnp.stack(own), *weights["layers"])
    return weights | {"layers": layers}


def make_memory(shape: Shape, batch: int, slots: int, scanned: bool) -> Any:
    """Empty keys and values of all layers."""
    size = (batch, shape.heads, slots, shape.head)

    def empty(*layers: int) -> tuple[jax.Array, jax.Array]:
        # Each an array of its own, which can be donated.
        zeros = (jnp.zeros((*layers, *size), jnp.bfloat16) for _ in range(2))
        return next(zeros), next(zeros)

    if scanned:
        return empty(shape.layers)
    return tuple(empty() for _ in range(shape.layers))


def make_cross(shape: Shape, batch: int, scanned: bool, seed: int = 5) -> Any:
    """Keys and values of a source, the same in each row."""
    keys = jax.random.split(jax.random.key(seed), (shape.layers, 2))
    size = (1, shape.heads, SOURCE, shape.head)

    def one(key: jax.Array) -> jax.Array:
        return jnp.repeat(_normal(key, size, 1.0), batch, axis=0)

    made = tuple((one(keys[i, 0]), one(keys[i, 1])) for i in range(shape.layers))
    return jax.tree.map(lambda *own: jnp.stack(own), *made) if scanned else made


def feed(
    shape: Shape, weights: Weights, memory: Any, cross: Any, tokens: Any, length: Any
) -> tuple[jax.Array, Any]:
    """One pass of the decoder over ``tokens [B, T]`` from slot ``length [B]`` on.

    Returns:
        ``float32[B, T, V]`` logits, and the memory with these tokens in it.
    """
    scanned = isinstance(weights["layers"], dict)
    slots = jax.tree.leaves(memory)[0].shape[-2]
    rows = jnp.arange(tokens.shape[0])[:, None]
    place = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    distance = place[:, :, None] - jnp.arange(slots, dtype=jnp.int32)[None, None]
    table = weights["bias"][_buckets(slots)].astype(jnp.float32)
    bias = jnp.moveaxis(table[jnp.clip(distance, 0, slots - 1)], -1, 1)
    bias = jnp.where(distance[:, None] >= 0, bias, -1e9)

    def layer(x: jax.Array, parts: Any) -> tuple[jax.Array, Any]:
        own, (keys, values), source = parts
        fused = _norm(x, own["norms"][0]) @ own["qkv"].T
        query, key, value = jnp.split(fused, 3, axis=-1)
        new = (_heads(key, shape), _heads(value, shape))
        # Written first, at each row's own place; what runs off the end is dropped.
        keys, values = (
            old.at[rows, :, place].set(jnp.moveaxis(one, 2, 1), mode="drop")
            for old, one in zip((keys, values), new, strict=True)
        )
        x = x + _attend(_heads(query, shape), keys, values, bias) @ own["out"].T
        query = _heads(_norm(x, own["norms"][1]) @ own["query"].T, shape)
        x = x + _attend(query, source[0], source[1], None) @ own["cross"].T
        gate, up = jnp.split(_norm(x, own["norms"][2]) @ own["wi"].T, 2, axis=-1)
        return x + (jax.nn.gelu(gate) * up) @ own["wo"].T, (keys, values)

    x = weights["embedding"][tokens]
    if scanned:
        x, memory = jax.lax.scan(layer, x, (weights["layers"], memory, cross))
    else:
        made = []
        for parts in zip(weights["layers"], memory, cross, strict=True):
            x, written = layer(x, parts)
            made.append(written)
        memory = tuple(made)
    x = _norm(x, weights["norm"])
    logits = jnp.einsum(
        "btd,vd->btv", x, weights["head"], preferred_element_type=jnp.float32
    )
    return logits, memory


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * size).astype(x.dtype) * scale[None, None]


def _heads(x: jax.Array, shape: Shape) -> jax.Array:
    batch, fed, _ = x.shape
    return x.reshape(batch, fed, shape.heads, shape.head).transpose(0, 2, 1, 3)


def _attend(query: Any, keys: Any, values: Any, bias: Any) -> jax.Array:
    scores = jnp.einsum(
        "bhtk,bhlk->bhtl", query, keys, preferred_element_type=jnp.float32
    )
    scores = scores * query.shape[-1] ** -0.5
    law = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1)
    mixed = jnp.einsum("bhtl,bhlk->bthk", law.astype(values.dtype), values)
    return mixed.reshape(*mixed.shape[:2], -1)


def _buckets(slots: int) -> np.ndarray:
    """T5's bucket of each distance back."""
    distance = np.arange(slots)
    far = np.log(np.maximum(distance, 1) / 16 + 1e-9) / math.log(128 / 16) * 16
    large = np.minimum(16 + far.astype(np.int64), 31)
    return np.where(distance < 16, distance, large).astype(np.int32)
