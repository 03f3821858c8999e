"""The model drafter's memory, vocabulary and draws, on hand-made models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelDrafter, Sampling
from specjax.proof.tables import reference_law
from specjax.sampling import draw
from specjax.types import Noise
from tests.helpers import (
    HashModel,
    hash_pair,
    quick_compile,  # noqa: F401
    row_keys,
)

GAMMA, ROWS, SIZE = 4, 4, 20
TARGET, DRAFT = hash_pair()
INPUTS = jnp.asarray(np.random.default_rng(0).integers(2, 64, (ROWS, 5)), jnp.int32)
MASK = jnp.ones(INPUTS.shape, bool)


def draft(model, lengths, sampling=None, gamma=GAMMA):
    """One block after random texts of the given lengths, from a fresh memory."""
    sampling = Sampling(temperature=None) if sampling is None else sampling
    drafter, length = ModelDrafter(model), jnp.asarray(lengths)
    generator = np.random.default_rng(1)
    tokens = jnp.asarray(generator.integers(2, 64, (ROWS, SIZE)), jnp.int32)

    @jax.jit
    def run(drafter, tokens, length):
        encoded = TARGET.encode(INPUTS, MASK)
        prefix = tokens[:, : max(lengths)]
        state = drafter.init(TARGET, encoded, INPUTS, MASK, prefix, length, SIZE)
        noise = Noise(keys=row_keys(2, ROWS), start=length - 1)
        return drafter.draft(
            TARGET, noise, state, tokens, length, gamma=gamma, sampling=sampling
        )

    block, state = run(drafter, tokens, length)
    return block, state, tokens


def chain(model, text: list[int], source: list[int], choose) -> list[int]:
    """The drafted tokens, one full pass of the model for each."""
    written = []
    encoded = model.encode(jnp.array([source]), jnp.ones((1, len(source)), bool))
    for depth in range(1, GAMMA + 1):
        stands = text + written
        buffer = jnp.array([stands + [0] * (SIZE - len(stands))])
        output, _ = model.decode(buffer, None, encoded)
        written.append(choose(np.asarray(output.logits)[0, len(stands) - 1], depth))
    return written


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [1, 2, 2, 1], [3, 1, 7, 2]])
def test_greedy_blocks_are_the_models_own_text(lengths):
    block, _, tokens = draft(DRAFT, lengths)
    for row, length in enumerate(lengths):
        text = tokens[row, :length].tolist()
        source = INPUTS[row].tolist()
        wanted = chain(DRAFT, text, source, lambda logits, _: int(logits.argmax()))
        assert block.tokens[row].tolist() == wanted
    assert (block.length == GAMMA).all()


def test_sampled_blocks_draw_each_depth_with_its_own_key():
    """Shared noise rests on this: depth d is drawn with noise.key(d, d)."""
    lengths = [3, 1, 7, 2]
    settings = dict(temperature=0.7, top_k=5)
    block, _, tokens = draft(DRAFT, lengths, Sampling(**settings))
    laws = block.law.dense(64)
    for row, length in enumerate(lengths):
        seen = []

        def choose(logits, depth, row=row, seen=seen):
            seen.append(reference_law(logits, **settings))
            key = jax.random.fold_in(row_keys(2, ROWS)[row], depth)
            return int(draw(key, jnp.asarray(seen[-1], jnp.float32)))

        wanted = chain(
            DRAFT, tokens[row, :length].tolist(), INPUTS[row].tolist(), choose
        )
        assert block.tokens[row].tolist() == wanted
        np.testing.assert_allclose(laws[row], seen, atol=1e-5)


@pytest.mark.parametrize("width", [60, 72])
def test_vocabulary_of_another_width(width):
    """p and q have the target's width; what the target lacks is never proposed."""
    _, model = hash_pair(draft_vocab=width)
    model = HashModel(model.table.at[:, 64:].add(50.0))
    for sampling in (Sampling(), Sampling(temperature=None)):
        block, _, _ = draft(model, [1, 2, 3, 4], sampling)
        laws = np.asarray(block.law.dense(64))
        assert block.tokens.max() < min(width, 64)
        np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-5)
        assert not laws[..., min(width, 64) :].any()


def test_gamma_of_one():
    block, _, _ = draft(DRAFT, [1, 2, 3, 4], gamma=1)
    longer, _, _ = draft(DRAFT, [1, 2, 3, 4])
    np.testing.assert_array_equal(block.tokens, longer.tokens[:, :1])
    assert block.law.probs.shape[:2] == (ROWS, 1)
