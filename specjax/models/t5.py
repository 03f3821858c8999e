"""T5 and its family (1.0, 1.1, LM-adapted, FLAN, mT5, ByT5, umT5) in Flax NNX.

Weights are stored ``[out, in]`` as in Hugging Face checkpoints; q, k, v and the two
input projections of a gated feed-forward are fused into one array each, so that a
decoder step launches few products. Position lives in the relative bias alone, never in
the keys.

Raffel et al. 2020 (arXiv:1910.10683); Shazeer 2020 (arXiv:2002.05202) for gated layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import InputError
from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.models.dense import dense
from specjax.models.embedding import look_up
from specjax.models.t5_bias import (
    MASKED,
    geometry,
    past_bias,
    present_bias,
    relative_position_bucket,
)
from specjax.models.t5_config import T5Config


@struct.dataclass
class KeysValues:
    """Keys and values of one layer's attention, ``[B, H, L, K]`` each."""

    keys: Float[Array, "B H L K"]
    values: Float[Array, "B H L K"]


def _normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> nnx.Param:
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
        self.wi = _normal(
            wi_key, (width, config.d_ff, config.d_model), config.d_model**-0.5
        )
        self.wo = _normal(wo_key, (config.d_model, config.d_ff), config.d_ff**-0.5)
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
        self.out = _normal(out_key, (width, inner), inner**-0.5)
        shape = (config.num_buckets, config.num_heads)
        self.bias = _normal(bias_key, shape, width**-0.5) if has_bias else None

    def project(self, x: jax.Array, heads: int) -> tuple[jax.Array, KeysValues]:
        """``[B, T, D]`` -> queries ``[B, H, T, K]`` and the new keys and values."""
        fused = dense(self.norm(x), self.qkv[...])
        q, k, v = (_split_heads(fused[..., i, :], heads) for i in range(3))
        return q, KeysValues(keys=k, values=v)


class CrossAttention(nnx.Module):
    """Attention from the decoder to the encoder's output; it has no position bias."""

    def __init__(self, config: T5Config, key: jax.Array):
        q_key, kv_key, out_key = jax.random.split(key, 3)
        width, inner = config.d_model, config.d_attention
        self.norm = RMSNorm(config)
        self.q = _normal(q_key, (inner, width), (width * config.d_kv) ** -0.5)
        self.kv = _normal(kv_key, (2, inner, width), width**-0.5)
        self.out = _normal(out_key, (width, inner), inner**-0.5)

    def keys_values(self, hidden: jax.Array, heads: int) -> KeysValues:
        """Projects the encoder's output, once per source."""
        fused = dense(hidden, self.kv[...])
        return KeysValues(
            keys=_split_heads(fused[..., 0, :], heads),
            values=_split_heads(fused[..., 1, :], heads),
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


def _split_heads(x: jax.Array, heads: int) -> jax.Array:
    batch, length, inner = x.shape
    return x.reshape(batch, length, heads, inner // heads).transpose(0, 2, 1, 3)


def _attend(
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


def _write(memory: KeysValues, new: KeysValues, slots: jax.Array) -> KeysValues:
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


class T5(nnx.Module):
    """A T5 encoder-decoder. Owns the embedding, which a tied head shares.

    With ``config.encoder_width`` it is a draft that shares its target's encoder: it has
    a projection in the place of an encoder, and `encode_shared` in that of `encode`.

    Args:
        config: the shape.
        key: initialises the parameters.
    """

    def __init__(self, config: T5Config, key: Key[Array, ""]):
        self.config = config
        keys = jax.random.split(key, 4)
        width = config.d_model
        self.embedding = _normal(keys[0], (config.vocab_size, width), 1.0)
        encoder_keys = jax.random.split(keys[1], config.num_encoder_layers)
        decoder_keys = jax.random.split(keys[2], config.num_decoder_layers)
        self.encoder = nnx.List(
            EncoderBlock(config, k, i == 0 or config.bias_per_layer)
            for i, k in enumerate(encoder_keys)
        )
        self.decoder = nnx.List(
            DecoderBlock(config, k, i == 0 or config.bias_per_layer)
            for i, k in enumerate(decoder_keys)
        )
        read = config.encoder_width
        self.encoder_norm = RMSNorm(config) if read is None else None
        self.projection = (
            None if read is None else _normal(keys[1], (width, read), read**-0.5)
        )
        self.decoder_norm = RMSNorm(config)
        self.head = (
            None
            if config.tied_head
            else _normal(keys[3], (config.vocab_size, width), width**-0.5)
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.config.vocab_size

    @property
    def shares_encoder(self) -> bool:
        """Whether it reads a target's encoder and has none of its own."""
        return self.projection is not None

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the parameters and of the activations."""
        return self.embedding[...].dtype

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes sources and projects the cross-attention keys and values, once.

        Args:
            inputs: source ids.
            mask: True at real tokens. Ids play no part in it: an id 0 inside a source
                is a token like any other.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: the model shares its target's encoder.
        """
        config = self.config
        if self.encoder_norm is None:
            raise InputError(
                "this draft has no encoder of its own: it reads that of a target of "
                f"width {config.encoder_width}, and drafts for one alone"
            )
        dropout = Dropout(dropout_key, config.dropout_rate)
        positions = np.arange(inputs.shape[1])
        buckets = relative_position_bucket(
            positions[None, :] - positions[:, None],
            bidirectional=True,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
        )
        invisible = jnp.where(mask, 0.0, MASKED)[:, None, None, :]
        x = dropout(look_up(self.embedding[...], inputs))
        bias = invisible
        for block in self.encoder:
            if block.attention.bias is not None:
                table = block.attention.bias[...].astype(jnp.float32)
                bias = table[buckets].transpose(2, 0, 1)[None] + invisible
            queries, memory = block.attention.project(x, config.num_heads)
            mixed = _attend(queries, [(memory, bias)], dropout)
            x = x + dropout(dense(mixed, block.attention.out[...]))
            x = block.feed_forward(x, dropout)
        encoded = Encoded(hidden=dropout(self.encoder_norm(x)), mask=mask)
        return encoded.replace(cross=self._cross(encoded))

    def check_encoder_width(self, width: int) -> None:
        """Refuses a target whose encoder this draft cannot read.

        Args:
            width: of the target.

        Raises:
            InputError: the draft shares its target's encoder, of another width.
        """
        wanted = self.config.encoder_width
        if wanted is not None and wanted != width:
            raise InputError(
                f"the draft reads the encoder of a target of width {wanted}, and this "
                f"target's width is {width}"
            )

    def encode_shared(
        self, encoded: Encoded, *, dropout_key: Key[Array, ""] | None = None
    ) -> Encoded:
        """Projects a target's encoder output; takes the place of `encode`.

        Args:
            encoded: the target's; no gradient flows into it.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: the model has an encoder of its own, or reads another width.
        """
        if self.projection is None:
            raise InputError("this model has an encoder of its own: call encode")
        self.check_encoder_width(encoded.hidden.shape[-1])
        dropout = Dropout(dropout_key, self.config.dropout_rate)
        hidden = jax.lax.stop_gradient(encoded.hidden).astype(self.dtype)
        own = Encoded(
            hidden=dropout(dense(hidden, self.projection[...])), mask=encoded.mask
        )
        return own.replace(cross=self._cross(own))

    def _cross(self, encoded: Encoded) -> tuple[KeysValues, ...]:
        heads = self.config.num_heads
        return tuple(b.cross.keys_values(encoded.hidden, heads) for b in self.decoder)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """An empty cache of `size` slots per row."""
        config = self.config
        shape = (batch_size, config.num_heads, size, config.d_kv)
        memory = tuple(
            KeysValues(
                keys=jnp.zeros(shape, self.dtype), values=jnp.zeros(shape, self.dtype)
            )
            for _ in self.decoder
        )
        return Cache(memory=memory, length=jnp.zeros(batch_size, jnp.int32))

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
        """Feeds T tokens per row at that row's own offset.

        Args:
            tokens: ids to feed; token t of row b takes slot ``cache.length[b] + t``.
            cache: memory of what was fed before; None: teacher forcing from an empty
                memory, nothing is kept.
            encoded: from `encode`.
            parents: the fed tokens are nodes `start` and on of a tree (see `trees`):
                each sees the slots before the tree, its ancestors and itself.
            start: static; nodes of the tree that earlier calls have fed.
            taps: static numbers of decoder layers whose output is returned; -1 is the
                hidden state after the final norm.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: a tap names no layer.
        """
        config = self.config
        for tap in taps:
            if not -1 <= tap < config.num_decoder_layers:
                raise InputError(
                    f"tap {tap} names no decoder layer: 0 to "
                    f"{config.num_decoder_layers - 1}, or -1 for the final norm"
                )
        dropout = Dropout(dropout_key, config.dropout_rate)
        batch, fed = tokens.shape
        length = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        where = geometry(length, fed, parents, start)
        slots = length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None]
        cross_memory = encoded.cross or self._cross(encoded)
        invisible = jnp.where(encoded.mask, 0.0, MASKED)[:, None, None, :]

        x = dropout(look_up(self.embedding[...], tokens))
        past = present = jnp.zeros(())
        new_memory, features = [], {}
        for i, block in enumerate(self.decoder):
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
            mixed = _attend(queries, visible, dropout)
            if cache is not None:
                # What is fed now is attended to directly, and written last. The slots
                # are made to depend on the attention's result (NaN moves them, which
                # harms nothing more), so that the compiler sees that all reads of the
                # cache are over and writes in place; else it copies the cache each
                # step.
                late = slots + jnp.isnan(mixed[:, :1, 0]).astype(jnp.int32)
                new_memory.append(_write(cache.memory[i], memory, late))
            x = x + dropout(dense(mixed, block.attention.out[...]))

            queries = dense(block.cross.norm(x), block.cross.q[...])
            queries = _split_heads(queries, config.num_heads)
            mixed = _attend(queries, [(cross_memory[i], invisible)], dropout)
            x = x + dropout(dense(mixed, block.cross.out[...]))
            x = block.feed_forward(x, dropout)
            features[i] = x
        x = dropout(self.decoder_norm(x))
        features[-1] = x
        output = DecoderOutput(
            logits=self._logits(x), features=tuple(features[tap] for tap in taps)
        )
        if cache is None:
            return output, None
        return output, Cache(memory=tuple(new_memory), length=length + fed)

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """Moves a tree's accepted path together: see `models.base`."""
        places = base[:, None] + path
        targets = base[:, None] + 1 + jnp.arange(path.shape[1], dtype=jnp.int32)[None]

        def move(memory: KeysValues) -> KeysValues:
            taken = jax.tree.map(
                lambda x: jnp.take_along_axis(
                    x, places[:, None, :, None], axis=2, mode="clip"
                ),
                memory,
            )
            return _write(memory, taken, targets)

        return cache.replace(memory=tuple(move(memory) for memory in cache.memory))

    def _logits(self, hidden: jax.Array) -> jax.Array:
        weight = self.embedding if self.head is None else self.head
        if self.config.scaled_head:
            hidden = hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype)
        # Rounded to bfloat16, distinct logits would tie.
        return dense(hidden, weight[...], jnp.float32)
