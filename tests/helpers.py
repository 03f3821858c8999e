"""Models of exactly known law, scripted drafters, and the statistics to judge them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from scipy import stats

from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law


@pytest.fixture(scope="module", autouse=True)
def quick_compile() -> Iterator[None]:
    """Halves the time to compile, at the price of slower programs.

    A module of small decodes imports this; one that draws many samples does not.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def write_tokens(cache: Cache, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A memory of fed tokens with `tokens` overwritten at each row's slots."""
    slots = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    rows = jnp.arange(tokens.shape[0])[:, None]
    return cache.memory.at[rows, slots].set(tokens, mode="drop"), slots


@struct.dataclass
class TableModel:
    """An encoder-decoder whose next-token law is a table over the whole prefix.

    Its cache holds the fed tokens themselves, so that a slot that was not rolled back,
    or was written at the wrong place, changes the law.

    Attributes:
        logits: ``[P, V]``: a row per prefix of 0 .. depth tokens after the start token.
        depth: longest prefix that the table tells apart (static).
    """

    logits: jax.Array
    depth: int = struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def encode(self, inputs, mask, *, dropout_key=None):
        hidden = jnp.zeros(inputs.shape + (1,), jnp.float32)
        return Encoded(hidden=hidden, mask=mask, cross=())

    def init_cache(self, batch_size, size):
        return Cache(
            memory=jnp.full((batch_size, size), 7, jnp.int32),
            length=jnp.zeros(batch_size, jnp.int32),
        )

    def decode(
        self, tokens, cache, encoded, *, parents=None, taps=(), dropout_key=None
    ):
        assert parents is None, "it decodes chains"
        memory, slots = write_tokens(cache, tokens)
        index = jnp.zeros(slots.shape, jnp.int32)
        for place in range(1, self.depth + 1):  # slot 0 holds the start token
            known = memory[:, place][:, None]
            longer = index * self.vocab_size + known + 1
            index = jnp.where(slots >= place, longer, index)
        logits = self.logits[jnp.clip(index, 0, len(self.logits) - 1)]
        length = cache.length + tokens.shape[1]
        return DecoderOutput(logits=logits), Cache(memory=memory, length=length)


@struct.dataclass
class HashModel:
    """A model of any length whose logits depend on every prefix and source token.

    Row h of the table, where h is a hash of what a decoder at that place may see: one
    wrong or misplaced token anywhere gives unrelated logits, and equal prefixes give
    equal bits at any batch, padding or buffer.

    Attributes:
        table: ``[P, V]`` logits.
    """

    table: jax.Array

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def encode(self, inputs, mask, *, dropout_key=None):
        weights = 31 * jnp.arange(inputs.shape[1]) + 7
        source = jnp.sum(jnp.where(mask, (inputs + 1) * weights[None], 0), axis=1)
        hidden = jnp.zeros(inputs.shape + (1,), jnp.float32)
        return Encoded(hidden=hidden, mask=mask, cross=source)

    def init_cache(self, batch_size, size):
        return Cache(
            memory=jnp.full((batch_size, size), 5, jnp.int32),
            length=jnp.zeros(batch_size, jnp.int32),
        )

    def decode(
        self, tokens, cache, encoded, *, parents=None, taps=(), dropout_key=None
    ):
        assert parents is None, "it decodes chains"
        if cache is None:
            cache = self.init_cache(*tokens.shape)
        memory, slots = write_tokens(cache, tokens)
        weights = 17 * jnp.arange(memory.shape[1]) + 3
        seen = jnp.cumsum((memory + 1) * weights[None], axis=1)
        seen = jnp.take_along_axis(seen, slots, axis=1, mode="clip")
        index = (seen + encoded.cross[:, None]) % len(self.table)
        length = cache.length + tokens.shape[1]
        return (
            DecoderOutput(logits=self.table[index]),
            Cache(memory=memory, length=length),
        )


@struct.dataclass
class ChainModel:
    """A model whose logits depend on the last token alone, so that its text repeats.

    Attributes:
        table: ``[V, V]`` logits.
    """

    table: jax.Array

    @property
    def vocab_size(self) -> int:
        return self.table.shape[1]

    def encode(self, inputs, mask, *, dropout_key=None):
        hidden = jnp.zeros(inputs.shape + (1,), jnp.float32)
        return Encoded(hidden=hidden, mask=mask, cross=())

    def init_cache(self, batch_size, size):
        return Cache(memory=(), length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self, tokens, cache, encoded, *, parents=None, taps=(), dropout_key=None
    ):
        assert parents is None, "it decodes chains"
        length = cache.length + tokens.shape[1]
        return DecoderOutput(logits=self.table[tokens]), cache.replace(length=length)


def hash_pair(
    seed: int = 0, vocab_size: int = 64, noise: float = 0.3, draft_vocab: int = 0
) -> tuple[HashModel, HashModel]:
    """A target and a draft that agrees with it on most of the argmaxes."""
    generator = np.random.default_rng(seed)
    table = generator.normal(size=(257, vocab_size)) * 2
    other = table + noise * 2 * generator.normal(size=table.shape)
    width = draft_vocab or vocab_size
    extra = np.zeros((257, max(0, width - vocab_size)))
    other = np.concatenate([other, extra], axis=1)[:, :width]
    return (
        HashModel(jnp.asarray(table, jnp.float32)),
        HashModel(jnp.asarray(other, jnp.float32)),
    )


def greedy_text(
    model: HashModel, source: list[int], prefix: list[int], steps: int
) -> list[int]:
    """What a greedy decoder must write, computed by hand on the host."""
    table = np.asarray(model.table)
    fixed = sum((token + 1) * (31 * i + 7) for i, token in enumerate(source))
    text = list(prefix)
    for _ in range(steps):
        seen = sum((token + 1) * (17 * i + 3) for i, token in enumerate(text))
        text.append(int(np.argmax(table[(seen + fixed) % len(table)])))
    return text


def ragged_sources(
    seed: int, rows: int, width: int, vocab_size: int = 64
) -> tuple[jax.Array, jax.Array]:
    """Sources of 1 .. `width` random ids (from 2 on), the rest pad."""
    generator = np.random.default_rng(seed)
    lengths = 1 + (np.arange(rows) * 3 + seed) % width
    mask = np.arange(width)[None] < lengths[:, None]
    inputs = generator.integers(2, vocab_size, (rows, width)) * mask
    return jnp.asarray(inputs, jnp.int32), jnp.asarray(mask)


TINY_T5 = T5Config(
    vocab_size=64,
    d_model=16,
    d_kv=4,
    num_heads=4,
    d_ff=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
)


def tiny_t5(seed: int = 0, **changes: Any) -> T5:
    """A random T5 of vocabulary 64, width 16 and 2 + 2 layers, with sharp logits."""
    config = dataclasses.replace(TINY_T5, **changes)
    model = jax.jit(lambda key: T5(config, key))(jax.random.key(seed))
    head = model.embedding if model.head is None else model.head
    head[...] = head[...] * 3.0
    return model


def perturbed(model: T5, seed: int, scale: float) -> T5:
    """The model with noise of `scale` times each parameter's own spread added."""
    graph, state = nnx.split(model)
    generator = np.random.default_rng(seed)

    def noisy(leaf: jax.Array) -> jax.Array:
        values = np.asarray(leaf)
        noise = scale * values.std() * generator.normal(size=leaf.shape)
        return jnp.asarray(values + noise, leaf.dtype)

    return nnx.merge(graph, jax.tree.map(noisy, state))


def num_prefixes(vocab_size: int, depth: int) -> int:
    return sum(vocab_size**d for d in range(depth + 1))


def as_table(probs: np.ndarray, depth: int) -> TableModel:
    """The model of given probabilities, one row per prefix."""
    probs = np.asarray(probs, np.float64)
    with np.errstate(divide="ignore"):
        return TableModel(logits=jnp.asarray(np.log(probs), jnp.float32), depth=depth)


def table_model(
    seed: int, vocab_size: int, depth: int, zeros: float = 0.0, like=None, mix=0.0
) -> TableModel:
    """Random laws; a share `zeros` of the entries is impossible.

    Args:
        like: a model whose laws are mixed in with weight `mix`: a draft that agrees.
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


def reference_law(
    logits: np.ndarray,
    temperature: float | None = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_tokens: int | None = None,
) -> np.ndarray:
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
    """The model whose plain laws are `model`'s under sampling settings."""
    rows = [reference_law(row, **settings) for row in np.asarray(model.logits)]
    return as_table(np.stack(rows), model.depth)


def joint_law(model: TableModel, length: int, eos_id: int | None = None) -> np.ndarray:
    """Exact probability of every sequence of `length` tokens, ``[V] * length``.

    With `eos_id`, everything after the first one is pad (0).
    """
    vocab_size = model.vocab_size
    probs = np.exp(np.asarray(model.logits, np.float64))
    probs /= probs.sum(-1, keepdims=True)
    law = np.zeros((vocab_size,) * length)
    for sequence in itertools.product(range(vocab_size), repeat=length):
        index, value, shown = 0, 1.0, list(sequence)
        for place, token in enumerate(sequence):
            value *= probs[index, token]
            index = index * vocab_size + token + 1
            index = min(index, len(probs) - 1)
            if token == eos_id:
                shown[place + 1 :] = [0] * (length - place - 1)
        if eos_id is not None and eos_id in sequence:
            # Sum out what would have followed: count the sequence once, padded.
            end = sequence.index(eos_id)
            if any(sequence[end + 1 :]):
                continue
            index, value = 0, 1.0
            for token in sequence[: end + 1]:
                value *= probs[index, token]
                index = index * vocab_size + token + 1
        law[tuple(shown)] += value
    return law


def chi_square_p(samples: np.ndarray, law: np.ndarray) -> float:
    """p-value of ``[rows, length]`` samples under an exact joint law.

    A sample of probability 0 gives 0. Cells that expect fewer than 5 are pooled.
    """
    samples = np.asarray(samples)
    cells = np.ravel_multi_index(tuple(samples.T), law.shape)
    counts = np.bincount(cells, minlength=law.size)
    law = np.asarray(law, np.float64).ravel()
    if counts[law <= 1e-12].any():
        return 0.0
    counts, law = counts[law > 1e-12], law[law > 1e-12]
    if len(law) == 1:
        return 1.0
    expected = law / law.sum() * len(samples)
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(stats.chisquare(counts, expected).pvalue)


def row_keys(seed: int, rows: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


@struct.dataclass
class ScriptState:
    call: jax.Array


@struct.dataclass
class ScriptDrafter:
    """Drafts by script: how many tokens, and how many of them are right.

    Attributes:
        truth: ``int32[B, L]`` the tokens that a greedy target will write, by place.
        right: ``int32[B, R]`` so many drafts of the row's step r are right, no more.
        length: ``int32[B, R]`` so many are drafted.
    """

    truth: jax.Array
    right: jax.Array
    length: jax.Array

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        return ScriptState(call=jnp.zeros(inputs.shape[0], jnp.int32))

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        step = jnp.minimum(state.call, self.right.shape[1] - 1)[:, None]
        right = jnp.take_along_axis(self.right, step, axis=1)
        drafted = jnp.take_along_axis(self.length, step, axis=1)[:, 0]
        depth = jnp.arange(gamma)[None]
        places = length[:, None] + depth
        truth = jnp.take_along_axis(self.truth, places, axis=1, mode="clip")
        wrong = (truth + 1) % target.vocab_size
        chosen = jnp.where(depth < right, truth, wrong).astype(jnp.int32)
        ids = chosen[..., None]
        law = Law(probs=jnp.ones(ids.shape, jnp.float32), ids=ids)
        return DraftBlock(tokens=chosen, length=drafted, law=law), state

    def commit(self, state, committed):
        return state.replace(call=state.call + 1)


def per_row(rows: int, temperature=1.0, top_k=None, top_p=None) -> Sampling:
    """Settings in one structure, whatever is off, so that all share a program."""
    return Sampling(
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        top_k=jnp.broadcast_to(jnp.int32(10**6 if top_k is None else top_k), rows),
        top_p=jnp.broadcast_to(jnp.float32(1.0 if top_p is None else top_p), rows),
    )
