"""Log-probabilities of a text: against NumPy, and against what a decode counts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import InputError, Sampling, autoregressive_generate
from specjax.controls import BannedTokens, RepetitionPenalty
from specjax.metrics.scores import token_log_probs
from tests.helpers import hash_pair, quick_compile, ragged_sources, row_keys  # noqa: F401

VOCAB, ROWS = 12, 4
TARGET, _ = hash_pair(vocab_size=VOCAB)
SOURCES = ragged_sources(0, ROWS, 7, VOCAB)
BANNED, PENALTY, KNOWN = 4, 1.7, 10


def laws(row: int, text: list[int]) -> np.ndarray:
    """The model's raw logits after every prefix of a text, by its definition."""
    inputs, mask = map(np.asarray, SOURCES)
    source = inputs[row][mask[row]].tolist()
    fixed = sum((token + 1) * (31 * i + 7) for i, token in enumerate(source))
    seen = np.cumsum([(token + 1) * (17 * i + 3) for i, token in enumerate(text)])
    return np.asarray(TARGET.table, np.float64)[(seen + fixed) % len(TARGET.table)]


def by_hand(logits, text, temperature, top_k, top_p) -> float:
    """Of the last token of a text, given the logits after those before it."""
    logits, token = np.array(logits), text[-1]
    logits[KNOWN:] = -np.inf
    for index in set(text[:-1]):
        worse = logits[index] < 0
        logits[index] *= PENALTY if worse else 1 / PENALTY
    logits[BANNED] = -np.inf
    order = np.argsort(-logits, kind="stable")
    law = np.exp((logits - logits.max()) / temperature)
    law[order[top_k:]] = 0
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= top_p]] = 0
    return float(np.log(law[token] / law.sum())) if law[token] else -np.inf


def test_log_probs_are_those_of_the_sampling_law():
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCAB, (ROWS, 12))
    # Temperature 0 counts as 1: the point of a greedy law says nothing.
    temperature, top_k = [0.5, 1.0, 1.6, 0.0], [3, 7, 9, 12]
    top_p = [1.0, 0.8, 0.9, 1.0]
    sampling = Sampling(
        temperature=jnp.array(temperature, jnp.float32),
        top_k=jnp.array(top_k, jnp.int32),
        top_p=jnp.array(top_p, jnp.float32),
        controls=(RepetitionPenalty(PENALTY), BannedTokens(jnp.array([BANNED]))),
        num_tokens=KNOWN,
    )
    found = token_log_probs(
        TARGET, *SOURCES, jnp.asarray(tokens, jnp.int32), sampling=sampling
    )
    wanted = np.zeros((ROWS, 11))
    for row in range(ROWS):
        text = tokens[row].tolist()
        for place, logits in enumerate(laws(row, text[:-1]), start=1):
            wanted[row, place - 1] = by_hand(
                logits,
                text[: place + 1],
                temperature[row] or 1.0,
                top_k[row],
                top_p[row],
            )
    assert np.isinf(wanted).any() and np.isfinite(wanted).sum() > 15
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_without_controls_they_are_those_that_the_loop_counts(temperature):
    sampling = Sampling(temperature=temperature, num_tokens=KNOWN)
    output = autoregressive_generate(
        TARGET,
        *SOURCES,
        row_keys(0, ROWS),
        sampling=sampling,
        max_length=12,
        log_probs=True,
    )
    found = token_log_probs(TARGET, *SOURCES, output.tokens, sampling=sampling)
    for own, other, length in zip(found, output.log_probs, output.length, strict=True):
        np.testing.assert_allclose(own[: length - 1], other[1:length], atol=1e-5)
        assert (own[: length - 1] < 0).all()


def test_refusals():
    with pytest.raises(InputError, match="tokens have 1 column"):
        token_log_probs(TARGET, *SOURCES, jnp.zeros((ROWS, 1), jnp.int32))
    with pytest.raises(InputError, match="sampling.top_p is 2"):
        token_log_probs(
            TARGET,
            *SOURCES,
            jnp.zeros((ROWS, 3), jnp.int32),
            sampling=Sampling(top_p=2.0),
        )
