"""The layers of a T5, and the loop over its decoder's.

Weights are stored ``[out, in]`` as in Hugging Face checkpoints; q, k, v and the two
input projections of a gated feed-forward are fused into one array each, so that a
decoder step launches few products.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from specjax.models.base import Cache
from specjax.models.dense import dense
from specjax.models.t5_bias import MASKED, geometry, past_bias, present_bias
from specjax.models.t5_config import T5Config


@struct.dataclass
class KeysValues:
    """Keys and values of one layer's attention, ``[B, H, L, K]`` each."""

    keys: Float[Array, "B H L K"]
    values: Float[Array, "B H L K"]


def normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> nnx.Param:
    """A parameter drawn from a normal law."""
    return nnx.Param(stddev * jax.random.normal(key, shape))


class RMSNorm(nnx.Module):
    """T5's layer norm: scale only, no mean and no bias, in float32."""

    def __init__(self, config: T5Config):
        self.scale = nnx.Param(jnp.ones(config.d_model))
        self.eps = config.eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return (wide * inverse).astype(x.dtype) * scale


class FeedForward(nnx.Module):
    """Position-wise feed-forward layer, gated or not."""

    def __init__(self, config: T5Config, key: jax.Array):
        wi_key, wo_key = jax.random.split(key)
        width = 2 if config.gated else 1
        self.norm = RMSNorm(config)
        self.wi = normal(
            wi_key, (width, config.d_ff, config.d_model), config.d_model**-0.5
        )
        self.wo = normal(wo_key, (config.d_model, config.d_ff), config.d_ff**-0.5)
        self.activation = config.activation

    def __call__(self, x: jax.Array, dropout: Dropout) -> jax.Array:
        hidden = dense(self.norm(x), self.wi[...])
        act = jax.nn.relu if self.activation == "relu" else jax.nn.gelu
        gate = act(hidden[..., 0, :])
        if hidden.shape[-2] == 2:
            gate = gate * hidden[..., 1, :]
        return x + dropout(dense(dropout(gate), self.wo[...]))


class SelfAttention(nnx.Module):
    """Self-attention with fused projections; block 0 (or each) owns a bias table."""

    def __init__(self, config: T5Config, key: jax.Array, has_bias: bool):
        qkv_key, out_key, bias_key = jax.random.split(key, 3)
        width, inner = config.d_model, config.d_attention
        self.norm = RMSNorm(config)
        # T5 has no 1/sqrt(d_kv) in attention: the query's scale takes its place.
        scale = jnp.array([config.d_kv**-0.5, 1.0, 1.0])[:, None, None]
        qkv = jax.random.normal(qkv_key, (3, inner, width)) * scale
        self.qkv = nnx.Param(qkv * width**-0.5)
        self.out = normal(out_key, (width, inner), inner**-0.5)
        shape = (config.num_buckets, config.num_heads)
        self.bias = normal(bias_key, shape, width**-0.5) if has_bias else None

    def project(self, x: jax.Array, heads: int) -> tuple[jax.Array, KeysValues]:
        """``[B, T, D]`` -> queries ``[B, H, T, K]`` and the new keys and values."""
        fused = dense(self.norm(x), self.qkv[...])
        q, k, v = (split_heads(fused[..., i, :], heads) for i in range(3))
        return q, KeysValues(keys=k, values=v)


class CrossAttention(nnx.Module):
    """Attention from the decoder to the encoder's output; it has no position bias."""

    def __init__(self, config: T5Config, key: jax.Array):
        q_key, kv_key, out_key = jax.random.split(key, 3)
        width, inner = config.d_model, config.d_attention
        self.norm = RMSNorm(config)
        self.q = normal(q_key, (inner, width), (width * config.d_kv) ** -0.5)
        self.kv = normal(kv_key, (2, inner, width), width**-0.5)
        self.out = normal(out_key, (width, inner), inner**-0.5)

    def keys_values(self, hidden: jax.Array, heads: int) -> KeysValues:
        """Projects the encoder's output, once per source."""
        fused = dense(hidden, self.kv[...])
        return KeysValues(
            keys=split_heads(fused[..., 0, :], heads),
            values=split_heads(fused[..., 1, :], heads),
        )


class EncoderBlock(nnx.Module):
    """Self-attention and feed-forward."""

    def __init__(self, config: T5Config, key: jax.Array, has_bias: bool):
        attention_key, feed_forward_key = jax.random.split(key)
        self.attention = SelfAttention(config, attention_key, has_bias)
        self.feed_forward = FeedForward(config, feed_forward_key)


class DecoderBlock(nnx.Module):
    """Self-attention, cross-attention and feed-forward."""

    def __init__(self, config: T5Config, key: jax.Array, has_bias: bool):
        attention_key, cross_key, feed_forward_key = jax.random.split(key, 3)
        self.attention = SelfAttention(config, attention_key, has_bias)
        self.cross = CrossAttention(config, cross_key)
        self.feed_forward = FeedForward(config, feed_forward_key)

    def finish(
        self,
        x: jax.Array,
        mixed: jax.Array,
        cross: KeysValues,
        invisible: jax.Array,
        dropout: Dropout,
    ) -> jax.Array:
        """All that follows the softmax of the self-attention, whose result is `mixed`.

        Args:
            x: ``[B, T, D]`` the block's input.
            mixed: ``[B, T, H * K]``.
            cross: of the source.
            invisible: ``[B, 1, 1, S]``, `MASKED` where the source has no token.
            dropout: of this call.
        """
        x = x + dropout(dense(mixed, self.attention.out[...]))
        queries = dense(self.cross.norm(x), self.cross.q[...])
        queries = split_heads(queries, cross.keys.shape[1])
        mixed = attend(queries, [(cross, invisible)], dropout)
        x = x + dropout(dense(mixed, self.cross.out[...]))
        return self.feed_forward(x, dropout)


class Dropout:
    """Dropout with one key per use, drawn in call order; no key: the identity.

    The mask is shared along the sequence, as in T5X: random bits are a visible cost.
    """

    def __init__(self, key: jax.Array | None, rate: float):
        self._key = key if rate > 0 else None
        self._rate = rate
        self._uses = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        if self._key is None:
            return x
        key = jax.random.fold_in(self._key, self._uses)
        self._uses += 1
        shape = x.shape[:-2] + (1, x.shape[-1])
        kept = jax.random.bernoulli(key, 1.0 - self._rate, shape)
        return jnp.where(kept, x / (1.0 - self._rate), jnp.zeros((), x.dtype))


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """``[B, T, H * K]`` -> ``[B, H, T, K]``."""
    batch, length, inner = x.shape
    return x.reshape(batch, length, heads, inner // heads).transpose(0, 2, 1, 3)


def attend(
    queries: jax.Array,
    memories: Sequence[tuple[KeysValues, jax.Array]],
    dropout: Dropout,
) -> jax.Array:
    """Softmax attention in float32 over one or more memories -> ``[B, T, H * K]``.

    Args:
        queries: ``[B, H, T, K]``.
        memories: keys and values, each with the bias of its scores.
        dropout: of the attention weights.
    """
    scores = [
        jnp.einsum(
            "bhtk,bhlk->bhtl",
            queries,
            memory.keys,
            preferred_element_type=jnp.float32,
        )
        + bias
        for memory, bias in memories
    ]
    weights = dropout(jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1))
    mixed, at = jnp.zeros((), queries.dtype), 0
    for memory, _ in memories:
        size = memory.keys.shape[2]
        own = weights[..., at : at + size].astype(memory.values.dtype)
        mixed = mixed + jnp.einsum("bhtl,bhlk->bthk", own, memory.values)
        at += size
    return mixed.reshape(mixed.shape[:2] + (-1,))


def write(memory: KeysValues, new: KeysValues, slots: jax.Array) -> KeysValues:
    """Overwrites `slots` ``[B, T]``; slots past the end are dropped, never clamped."""

    def put(buffer: jax.Array, values: jax.Array) -> jax.Array:
        def row(buffer: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
            return buffer.at[:, slots].set(
                values.astype(buffer.dtype),
                mode="drop",
                unique_indices=True,
                indices_are_sorted=True,
            )

        return jax.vmap(row)(buffer, values, slots)

    return jax.tree.map(put, memory, new)


def empty_memory(
    config: T5Config, layers: int, batch: int, size: int, dtype: jnp.dtype
) -> tuple[KeysValues, ...]:
    """Keys and values of `size` slots for each of some decoder layers."""
    shape = (batch, config.num_heads, size, config.d_kv)
    return tuple(
        KeysValues(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))
        for _ in range(layers)
    )


def run_decoder(
    blocks: Sequence[DecoderBlock],
    config: T5Config,
    x: Float[Array, "B T D"],
    cache: Cache | None,
    cross: Sequence[KeysValues],
    mask: Bool[Array, "B S"],
    *,
    parents: Int[Array, "#B M"] | None = None,
    start: int = 0,
    dropout: Dropout | None = None,
) -> tuple[list[Float[Array, "B T D"]], Cache | None]:
    """Runs decoder layers over what takes the place of T embedded tokens per row.

    Args:
        blocks: any decoder layers; the first has a bias table, which serves those after
            it that have none.
        config: their shape.
        x: the input of the first.
        cache: see `T5.decode`, as for `parents` and `start`.
        cross: keys and values of the encoder's output, of each layer.
        mask: True at real source tokens.
        parents: of the nodes of a tree, in one row if it is the same in all; None: a
            chain.
        start: static; nodes of the tree that earlier calls have fed.
        dropout: of this call; None: without.

    Returns:
        The output of each layer, and the cache after these tokens.
    """
    dropout = Dropout(None, 0.0) if dropout is None else dropout
    batch, fed = x.shape[:2]
    length = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
    where = geometry(length, fed, parents, start)
    slots = length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None]
    invisible = jnp.where(mask, 0.0, MASKED)[:, None, None, :]
    past = present = jnp.zeros(())
    new_memory, outputs = [], []
    for i, block in enumerate(blocks):
        if block.attention.bias is not None:
            table = block.attention.bias[...].astype(jnp.float32)
            present = present_bias(table, where, config.max_distance)
            if cache is not None:
                size = cache.memory[0].keys.shape[2]
                past = past_bias(table, where, size, config.max_distance)
        queries, memory = block.attention.project(x, config.num_heads)
        visible = [(memory, present)]
        if cache is not None:
            visible = [(cache.memory[i], past), (memory, present)]
        mixed = attend(queries, visible, dropout)
        if cache is not None:
            # What is fed now is attended to directly, and written last. The slots are
            # made to depend on the attention's result (NaN moves them, which harms
            # nothing more), so that the compiler sees that all reads of the cache are
            # over and writes in place; else it copies the cache each step.
            late = slots + jnp.isnan(mixed[:, :1, 0]).astype(jnp.int32)
            new_memory.append(write(cache.memory[i], memory, late))
        x = block.finish(x, mixed, cross[i], invisible, dropout)
        outputs.append(x)
    if cache is None:
        return outputs, None
    return outputs, Cache(memory=tuple(new_memory), length=length + fed)
