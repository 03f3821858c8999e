"""How near a choice was: the gap is what a logit must gain for the other token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import Sampling, autoregressive_generate, metrics
from tests.helpers import (
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)

ROWS, LENGTH = 4, 10
TARGET, _ = hash_pair()
WAYS = {
    "greedy": Sampling(temperature=None),
    "frozen": Sampling(temperature=0.0),
    "warm": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.7),
}


@struct.dataclass
class Gain:
    """A control that adds to one token's logit."""

    token: jax.Array
    amount: jax.Array

    def __call__(self, logits, tokens, length):
        return logits.at[self.token].add(self.amount)


def decode(sampling, rows=slice(None), **options):
    inputs, mask = ragged_sources(2, ROWS, 9)
    return autoregressive_generate(
        TARGET,
        inputs[rows],
        mask[rows],
        row_keys(8, ROWS)[rows],
        sampling=sampling,
        max_length=LENGTH,
        eos_id=-1,
        **options,
    )


def differences(sampling, plain, other):
    inputs, mask = ragged_sources(2, ROWS, 9)
    return metrics.differences(
        TARGET, inputs, mask, row_keys(8, ROWS), plain, other, sampling=sampling
    )


@pytest.mark.parametrize("name", WAYS)
def test_the_gap_is_what_the_other_token_lacks(name):
    sampling = WAYS[name]
    plain = decode(sampling)
    # Row 1 stays as it is; what follows the first difference is not looked at.
    places = {0: 3, 2: 1, 3: LENGTH - 1}
    tokens = np.array(plain.tokens)
    for row, place in places.items():
        tokens[row, place:] = (tokens[row, place:] + 5) % TARGET.vocab_size
    found = differences(sampling, plain, plain.replace(tokens=jnp.asarray(tokens)))
    assert {own.row: own.position for own in found} == places
    for own in found:
        wanted = tokens[own.row, own.position]
        for gain, token in (
            (own.gap - 0.01, plain.tokens[own.row, own.position]),
            (own.gap + 0.01, wanted),
        ):
            control = Gain(jnp.int32(wanted), jnp.float32(gain))
            again = decode(
                sampling.replace(controls=(control,)),
                slice(own.row, own.row + 1),
                prefix=plain.tokens[own.row : own.row + 1, : LENGTH - 1],
                prefix_length=jnp.array([own.position]),
                budget=1,
            )
            assert again.tokens[0, own.position] == token


def test_equal_outputs_have_no_difference():
    plain = decode(WAYS["warm"])
    assert differences(WAYS["warm"], plain, plain) == []


def test_a_text_is_not_the_same_as_its_beginning():
    """Ids of padding that were written are tokens; where one ends, no tie explains."""
    plain = decode(WAYS["greedy"])
    tokens = plain.tokens.at[1, 6:].set(0).at[2, 4:].set(0)
    plain = plain.replace(tokens=tokens)
    other = plain.replace(length=plain.length.at[1].set(6).at[2].set(4))
    for one, two in ((plain, other), (other, plain)):
        found = differences(WAYS["greedy"], one, two)
        assert [(own.row, own.position) for own in found] == [(1, 6), (2, 4)]
        assert all(own.gap == np.inf for own in found)
