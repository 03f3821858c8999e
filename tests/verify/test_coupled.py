"""Shared noise: the speculative sample is the autoregressive sample of the same key."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    NgramDrafter,
    Sampling,
    autoregressive_generate,
    speculative_generate,
    token_verify,
)
from specjax.verify import coupled_verify
from tests.helpers import (
    ChainModel,
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)

ROWS, LENGTH = 5, 24


TARGET, DRAFT = hash_pair()


@pytest.fixture(scope="module")
def plain():
    return {"hash": baseline(TARGET), "chain": baseline(chain())}


def chain() -> ChainModel:
    table = np.random.default_rng(0).normal(size=(64, 64)) * 5
    return ChainModel(jnp.asarray(table, jnp.float32))


def options() -> dict:
    return dict(
        sampling=Sampling(temperature=0.7),
        max_length=LENGTH,
        eos_id=3,
        prefix=jnp.array([[0, 7]] * ROWS, jnp.int32),
        prefix_length=jnp.array([1, 2, 2, 1, 2]),
    )


def sources():
    return *ragged_sources(2, ROWS, 9), row_keys(9, ROWS)


def baseline(target):
    return autoregressive_generate(target, *sources(), **options())


SLOW = pytest.mark.slow
CASES = [
    ("model", 1),
    ("model", 4),
    ("ngram", 3),
    *(pytest.param("model", gamma, marks=SLOW) for gamma in (2, 3, 5, 6, 7, 8)),
    *(pytest.param("ngram", gamma, marks=SLOW) for gamma in (1, 8)),
]


@pytest.mark.parametrize(("kind", "gamma"), CASES)
def test_equals_the_autoregressive_sample(plain, kind, gamma):
    """For every drafter and gamma, whatever the draft's own temperature."""
    target, drafter, name = TARGET, ModelDrafter(DRAFT), "hash"
    if kind == "ngram":
        target, drafter, name = chain(), NgramDrafter(), "chain"
    temperatures = (0.7,) if kind == "ngram" else (0.7, 0.2, 3.0)
    accepted = []
    for temperature in temperatures:
        on_draft = None if kind == "ngram" else Sampling(temperature=temperature)
        output = speculative_generate(
            target,
            drafter,
            *sources(),
            verifier=coupled_verify,
            gamma=gamma,
            draft_sampling=on_draft,
            **options(),
        )
        np.testing.assert_array_equal(output.tokens, plain[name].tokens)
        np.testing.assert_array_equal(output.length, plain[name].length)
        accepted.append(output.stats.accepted.sum() / output.stats.drafted.sum())
    assert 0.05 < min(accepted) and max(accepted) < 0.95
    assert accepted[0] == max(accepted)  # the same law and noise agree best


@pytest.mark.slow
def test_step_noise_gives_another_sample(plain):
    """The wrong twin: the rejection rule is exact in law, not sample by sample."""
    output = speculative_generate(
        TARGET, ModelDrafter(DRAFT), *sources(), verifier=token_verify, **options()
    )
    assert (output.tokens != plain["hash"].tokens).any(axis=1).all()
