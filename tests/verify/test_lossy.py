"""Lossy rules do what they say, and the statistic that proves losslessness sees it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelDrafter, Sampling, speculative_generate, verify
from specjax.errors import InputError
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import joint_law, table_model
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored
from tests.helpers import (
    quick_compile,  # noqa: F401
    row_keys,
)

ROWS, TOKENS = 50_000, 3
TARGET = table_model(0, 4, TOKENS - 1)
DRAFT = table_model(1, 4, TOKENS - 1, like=TARGET, mix=0.5)


def texts(verifier) -> np.ndarray:
    inputs = jnp.ones((ROWS, 1), jnp.int32)
    output = speculative_generate(
        TARGET,
        ModelDrafter(DRAFT),
        inputs,
        inputs > 0,
        row_keys(0, ROWS),
        verifier=verifier,
        sampling=Sampling(),
        gamma=2,
        max_length=TOKENS + 1,
        eos_id=-1,
    )
    return np.asarray(output.tokens[:, 1:])


@pytest.mark.parametrize(
    ("verifier", "lossless"),
    [
        (verify.lenient(1.0), True),
        (verify.lenient(0.6), False),
        (verify.typical(), False),
    ],
)
def test_what_is_lossy_is_seen(verifier, lossless):
    p = chi_square_p(texts(verifier), joint_law(TARGET, TOKENS))
    assert p > 1e-3 if lossless else p < 1e-6
    assert not verifier.lossless  # whatever its number: it is refused as a proof


def judge(verifier, tokens, q, p, greedy=False):
    p = jnp.asarray(p, jnp.float32)
    block = DraftBlock(
        tokens=jnp.array(tokens, jnp.int32),
        length=jnp.int32(len(tokens)),
        law=Law(probs=jnp.asarray(q, jnp.float32)),
    )
    law = Law(probs=p)
    if greedy:
        best = jnp.argmax(p, axis=-1, keepdims=True).astype(jnp.int32)
        law = Law(probs=jnp.ones_like(best, jnp.float32), ids=best)
    scored = Scored(law=law, logits=jnp.log(p) + 3.0)  # not normalised
    noise = Noise(keys=jax.random.key(0), start=jnp.int32(0))
    return verifier.rule(noise, block, scored, verifier.params)


def test_greedy_lenience_keeps_what_is_nearly_the_best():
    """The second token has 0.7 of the best one's probability, the third 0.3."""
    p = [[0.5, 0.35, 0.15]] * 4
    q = [[1 / 3] * 3] * 3
    for lenience, accepted in ((1.0, 1), (0.75, 1), (0.65, 2), (0.25, 3)):
        verdict = judge(verify.lenient(lenience), [0, 1, 2], q, p, greedy=True)
        assert (verdict.num_accepted, verdict.next_token) == (accepted, 0)


def test_typical_by_hand():
    flat, sharp = [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    q = [flat] * 2
    # Flat: delta exp(-H) = 0.09 / 4; sharp: its bar is 0.09 exp(-0.17) = 0.076.
    for tokens, accepted in (([3, 0], 2), ([3, 1], 1)):
        verdict = judge(verify.typical(), tokens, q, [flat, sharp, flat])
        assert verdict.num_accepted == accepted
    strict = verify.typical(epsilon=1.0, delta=2.0)
    assert judge(strict, [3, 0], q, [flat, sharp, flat]).num_accepted == 0


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5, float("nan")])
def test_lenience_that_means_nothing(lenience):
    with pytest.raises(InputError, match="lenience is .*: above 0 and at most 1"):
        verify.lenient(lenience)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 1.0), (2.0, 1.0), (0.3, 0.0), (0.3, float("inf"))]
)
def test_typical_settings_that_mean_nothing(epsilon, delta):
    with pytest.raises(InputError, match=f"epsilon is {epsilon} and delta {delta}"):
        verify.typical(epsilon, delta)
