"""Models of any length, tiny T5s and scripted drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.proof.tables import write_tokens
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law


def compile_with(quick: bool) -> Iterator[None]:
    """Body of a fixture: with most of XLA's optimizations left out, or with all."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, quick)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="module", autouse=True)
def quick_compile() -> Iterator[None]:
    """Halves the time to compile, at the price of slower programs.

    A module of small decodes imports this; one that draws many samples does not.
    """
    yield from compile_with(True)


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
    """Faster programs, also under `make test`: for a module that draws many samples."""
    yield from compile_with(False)


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
