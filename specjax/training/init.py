"""Initialisation for alignment: attention that looks for its like from the first step.

A relative-bias T5 that starts from plain noise finds out late where its
cross-attention has to look. Mimetic initialisation (Trockman and Kolter 2023,
arXiv:2305.09828) starts each attention near what trained ones do: a token looks for
tokens like itself and copies them. A few heads look at fixed offsets, so that a token
also carries its neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax import errors
from specjax.models import t5
from specjax.training import alignment

# Scale of the queries: 1.5 |k|^2 / sqrt(d_kv) puts a token's like far above the rest.
_SHARPNESS = 1.5
# Per head, from head 0 on: the offsets (key - query) it looks at, and how strongly.
_ENCODER_OFFSETS = (((-1,), 5.0), ((1,), 5.0), ((-1, 1), 3.0))
_DECODER_OFFSETS = (((-1,), 5.0), ((-2,), 5.0), ((-1, 0), 3.0))


def _align(keys: jax.Array, values: jax.Array, d_kv: int) -> tuple[jax.Array, ...]:
    """Query and output matrices for given key and value matrices ``[inner, D]``."""
    return _SHARPNESS * keys / d_kv**0.5, values.T


def _positional(
    table: jax.Array,
    offsets: tuple[tuple[tuple[int, ...], float], ...],
    *,
    bidirectional: bool,
    max_distance: int,
) -> jax.Array:
    """A bias table ``[buckets, H]`` of zeros but for the given offsets."""
    fresh = np.zeros(table.shape, np.float32)
    for head, (positions, strength) in enumerate(offsets):
        buckets = t5.relative_position_bucket(
            np.array(positions),
            bidirectional=bidirectional,
            num_buckets=table.shape[0],
            max_distance=max_distance,
        )
        fresh[buckets, head] = strength
    return jnp.asarray(fresh, table.dtype)


def mimetic_init(model: t5.T5) -> t5.T5:
    """A copy of `model` whose attentions start out aligned.

    In every attention ``o = v^T`` and ``q = 1.5 k / sqrt(d_kv)``; keys and values stay
    as they are. Self-attention's bias tables are zero but for three heads: encoder
    heads 0, 1 and 2 look one back, one ahead and at both neighbours, decoder heads one
    back, two back and at the last two tokens. An untied head starts as the embedding,
    scaled so that logits start near unit size for unlike tokens.

    Args:
        model: a freshly initialised T5 of at least four heads.

    Returns:
        A new model; `model` is unchanged.

    Raises:
        errors.InputError: fewer than four heads, which leaves none to look for content.
    """
    config = model.config
    if config.num_heads <= len(_ENCODER_OFFSETS):
        raise errors.InputError(
            f"mimetic_init needs num_heads >= {len(_ENCODER_OFFSETS) + 1}, got "
            f"{config.num_heads}: three heads look at positions, the rest at content"
        )
    model = jax.tree.map(lambda leaf: leaf, model)
    for blocks, offsets, bidirectional in (
        (model.encoder, _ENCODER_OFFSETS, True),
        (model.decoder, _DECODER_OFFSETS, False),
    ):
        for block in blocks:
            attention = block.attention
            _, keys, values = attention.qkv[...]
            queries, attention.out[...] = _align(keys, values, config.d_kv)
            attention.qkv[...] = jnp.stack([queries, keys, values])
            if attention.bias is not None:
                attention.bias[...] = _positional(
                    attention.bias[...],
                    offsets,
                    bidirectional=bidirectional,
                    max_distance=config.max_distance,
                )
    for block in model.decoder:
        keys, values = block.cross.kv[...]
        block.cross.q[...], block.cross.out[...] = _align(keys, values, config.d_kv)
    if model.head is not None:
        model.head[...] = model.embedding[...] * config.d_model**-0.5
    return model


def dictionary_init(
    model: t5.T5, links: alignment.Links, key: Key[Array, ""], own: float = 0.35
) -> t5.T5:
    """`mimetic_init`, and target pieces that start like the pieces they translate.

    Looking for one's like helps where a text is rewritten; between two languages a
    piece's like has another name. The embedding of a target piece starts as the mean of
    its source pieces', weighted by how often each is behind it; a piece of both
    languages is in between. The untied head, which only ever writes targets, starts
    from the translated part alone.

    Args:
        model: a freshly initialised T5 of at least four heads.
        links: from `alignment.align`, of the training pairs.
        key: for what is the target pieces' own.
        own: size of that part beside the translated one, which keeps apart pieces that
            translate the same.

    Raises:
        errors.InputError: as `mimetic_init`.
    """
    model = mimetic_init(model)
    plain = np.asarray(model.embedding[...], np.float64)
    noise = np.asarray(jax.random.normal(key, plain.shape), np.float64)
    translated = np.zeros_like(plain)
    known = links.source >= 0
    np.add.at(
        translated,
        links.target[known],
        links.count[known, None] * plain[links.source[known]],
    )
    written = np.linalg.norm(translated, axis=1, keepdims=True) > 0
    translated = np.where(written, _unit(_unit(translated) + own * _unit(noise)), 0.0)
    uses = links.source_count + links.target_count
    share = (links.target_count / np.maximum(uses, 1))[:, None]
    mixed = (1 - share) * _unit(plain) + share * translated
    size = np.linalg.norm(plain, axis=1, keepdims=True)
    mixed = np.where(uses[:, None] > 0, size * _unit(mixed), plain)
    model.embedding[...] = jnp.asarray(mixed, model.dtype)
    if model.head is not None:
        rows = size * translated * plain.shape[1] ** -0.5
        model.head[...] = jnp.asarray(rows, model.dtype)
    return model


def _unit(rows: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(size > 0, size, 1.0)
