"""Models whose laws are tables, and what follows from a table by exact sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float64, Int, Key

from specjax import trees
from specjax.models.base import Cache, DecoderOutput, Encoded


def write_tokens(
    cache: Cache, tokens: Int[Array, "B T"]
) -> tuple[Int[Array, "B L"], Int[Array, "B T"]]:
    """A memory of fed tokens with `tokens` overwritten at each row's slots.

    Args:
        cache: its memory holds the tokens.
        tokens: fed now.

    Returns:
        The memory, and the slots that were written.
    """
    slots = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    return cache.memory.at[rows, slots].set(tokens, mode="drop"), slots


@struct.dataclass
class TableModel:
    """An encoder-decoder whose next-token law is a table over the whole prefix.

    Its cache holds the fed tokens themselves, so that a slot that was not rolled back,
    or was written at the wrong place, changes the law.

    Attributes:
        logits: ``[K P, V]``: of each of K tables a row per prefix of 0 .. depth tokens
            after the start token. The first source token of a row picks its table,
            modulo K.
        depth: longest prefix that a table tells apart (static).
    """

    logits: Float[Array, "P V"]
    depth: int = struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        """Columns of the table."""
        return self.logits.shape[1]

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Keeps the first row of each source's table."""
        rows = num_prefixes(self.vocab_size, self.depth)
        hidden = jnp.zeros(inputs.shape + (1,), jnp.float32)
        tables = max(self.logits.shape[0] // rows, 1)
        first = inputs[:, 0] % tables * rows
        return Encoded(hidden=hidden, mask=mask, cross=first)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """Slots full of a token that was never fed."""
        return Cache(
            memory=jnp.full((batch_size, size), 7, jnp.int32),
            length=jnp.zeros(batch_size, jnp.int32),
        )

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
        """Looks up the row of the prefix that each fed token ends."""
        keeps = cache is not None
        cache = self.init_cache(*tokens.shape) if cache is None else cache
        memory, slots = write_tokens(cache, tokens)
        position = slots
        if parents is not None:
            base = cache.length[:, None] - start
            above = jax.vmap(trees.ancestors)(parents)
            depth = jax.vmap(trees.depths)(parents)
            nodes = jnp.arange(parents.shape[1])[None]
            fed = jnp.take_along_axis(memory, base + nodes, axis=1, mode="clip")
            own = slice(start, start + tokens.shape[1])
            position = base + depth[:, own]

        index = jnp.zeros(position.shape, jnp.int32)
        for place in range(1, self.depth + 1):  # slot 0 holds the start token
            known = memory[:, place][:, None]
            if parents is not None:
                # Of each node's ancestors, the one that stands at this place.
                there = above[:, own] & (depth == place - base)[:, None]
                passed = jnp.sum(jnp.where(there, fed[:, None], 0), axis=-1)
                known = jnp.where(place < base, known, passed)
            longer = index * self.vocab_size + known + 1
            index = jnp.where(position >= place, longer, index)
        first = encoded.cross[:, None]
        index = jnp.clip(first + index, 0, len(self.logits) - 1)
        output = DecoderOutput(logits=self.logits[index])
        fed_length = cache.length + tokens.shape[1]
        return output, Cache(memory=memory, length=fed_length) if keeps else None

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """Moves slot base + path[j] to base + 1 + j."""
        rows = jnp.arange(path.shape[0])[:, None]
        places = base[:, None] + 1 + jnp.arange(path.shape[1])[None]
        kept = cache.memory[rows, base[:, None] + path]
        memory = cache.memory.at[rows, places].set(kept, mode="drop")
        return cache.replace(memory=memory)


def num_prefixes(vocab_size: int, depth: int) -> int:
    """How many prefixes of 0 .. depth tokens there are."""
    return sum(vocab_size**d for d in range(depth + 1))


def as_table(probs: Any, depth: int) -> TableModel:
    """The model of given probabilities.

    Args:
        probs: ``[P, V]``, one row per prefix: the empty one, then those of one token in
            order of id, and so on.
        depth: tokens of the longest prefix.
    """
    probs = np.asarray(probs, np.float64)
    with np.errstate(divide="ignore"):
        return TableModel(logits=jnp.asarray(np.log(probs), jnp.float32), depth=depth)


def table_model(
    seed: int,
    vocab_size: int,
    depth: int,
    zeros: float = 0.0,
    like: TableModel | None = None,
    mix: float = 0.0,
) -> TableModel:
    """Random laws.

    Args:
        seed: of the laws.
        vocab_size: V.
        depth: tokens of the longest prefix that is told apart.
        zeros: share of entries that are impossible.
        like: a model whose laws are mixed in: a draft that agrees.
        mix: with this weight.
    """
    generator = np.random.default_rng(seed)
    rows = num_prefixes(vocab_size, depth)
    probs = generator.dirichlet(np.ones(vocab_size), rows)
    if like is not None:
        probs = (1 - mix) * probs + mix * np.exp(np.asarray(like.logits, np.float64))
    dead = generator.random(probs.shape) < zeros
    dead[np.arange(rows), generator.integers(vocab_size, size=rows)] = False
    probs = np.where(dead, 0.0, probs)
    return as_table(probs / probs.sum(-1, keepdims=True), depth)


def stacked(models: Sequence[TableModel]) -> TableModel:
    """One model of several tables of one size: source token k picks table k."""
    logits = jnp.concatenate([model.logits for model in models])
    return models[0].replace(logits=logits)


def reference_law(
    logits: Any,
    temperature: float | None = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_tokens: int | None = None,
) -> Float64[np.ndarray, " V"]:
    """`Sampling.law` of one position, written anew: a loop over ranked ids, float64."""
    logits = np.array(logits, np.float64)
    ids = range(len(logits) if num_tokens is None else min(num_tokens, len(logits)))
    ranked = sorted(ids, key=lambda i: (-logits[i], i))
    law = np.zeros(len(logits))
    if temperature is None or temperature == 0:
        law[ranked[0]] = 1.0
        return law
    ranked = ranked[: len(ranked) if top_k is None else top_k]
    weights = {i: np.exp((logits[i] - logits[ranked[0]]) / temperature) for i in ranked}
    total, before = sum(weights.values()), 0.0
    for i in ranked:
        if top_p is not None and top_p < 1 and before >= top_p:
            break
        law[i] = weights[i]
        before += weights[i] / total
    return law / law.sum()


def transformed(model: TableModel, **settings: Any) -> TableModel:
    """The model whose plain laws are `model`'s under sampling settings.

    Args:
        model: of any tables.
        **settings: of `reference_law`.
    """
    rows = [reference_law(row, **settings) for row in np.asarray(model.logits)]
    return as_table(np.stack(rows), model.depth)


def joint_law(model: TableModel, length: int, eos_id: int | None = None) -> np.ndarray:
    """Exact probability of every sequence of `length` tokens, ``[V] * length``.

    Args:
        model: of one table, no shallower than `length` - 1.
        length: tokens after the start token.
        eos_id: everything after the first one is pad (0). None: no token ends a text.
    """
    vocab_size = model.vocab_size
    probs = np.exp(np.asarray(model.logits, np.float64))
    probs /= probs.sum(-1, keepdims=True)
    law = np.zeros((vocab_size,) * length)
    for sequence in itertools.product(range(vocab_size), repeat=length):
        text = sequence
        if eos_id in sequence:
            # One sequence stands for all that could follow: the padded one.
            text = sequence[: sequence.index(eos_id) + 1]
            if any(sequence[len(text) :]):
                continue
        index, value = 0, 1.0
        for token in text:
            value *= probs[index, token]
            index = index * vocab_size + token + 1
        law[sequence] = value
    return law
