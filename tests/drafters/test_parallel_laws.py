"""Blocks of one pass by their statistics: the law drawn from, and the target's kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    Sampling,
    Verifier,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.parallel import ParallelDrafter
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import joint_law, table_model
from specjax.verify import coupled_verify
from tests.drafters.test_conformance import draft_once, lawful
from tests.helpers import row_keys
from tests.twins import right_rule

pytestmark = pytest.mark.slow  # many samples

ROWS, VOCAB, TOKENS, GAMMA = 60_000, 4, 4, 3
SHAPE = T5Config(
    vocab_size=VOCAB,
    d_model=8,
    d_kv=4,
    num_heads=2,
    d_ff=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
TARGET = table_model(0, VOCAB, TOKENS - 1)
# The Markov head, and the way slots are chosen.
KINDS = {"markov": (2, None), "argmax": (0, None), "independent": (0, "sampled")}


def make(kind: str, cls=ParallelDrafter) -> ParallelDrafter:
    """A random T5 of four ids, whose slots depend on each other where they can."""
    rank, slots = KINDS[kind]
    settings = {"max_gamma": GAMMA, "markov_rank": rank, "slots": slots}
    keys = jax.random.split(jax.random.key(0), 4)
    drafter = cls.from_model(TARGET, T5(SHAPE, keys[0]), settings, keys[1])
    markov = drafter.markov
    if markov is not None:
        after = 1.5 * jax.random.normal(keys[2], markov.after.shape)
        markov = markov.replace(after=after)
    sentinels = jax.random.normal(keys[3], drafter.sentinels.shape)
    return drafter.replace(sentinels=sentinels, markov=markov)


@struct.dataclass
class Forgetful(ParallelDrafter):
    """A wrong twin: tokens follow the Markov head, and the told law does not."""

    def draft(self, *arguments, **options):
        block, state = super().draft(*arguments, **options)
        flat, _ = self.replace(markov=None)._truly(*arguments, **options)
        return block.replace(law=flat.law), state

    _truly = ParallelDrafter.draft


@struct.dataclass
class Soft(ParallelDrafter):
    """A wrong twin: it takes the likeliest tokens, and tells that they were drawn."""

    def draft(self, *arguments, **options):
        block, state = super().draft(*arguments, **options)
        drawn, _ = self.replace(slots="sampled")._truly(*arguments, **options)
        return block.replace(law=drawn.law), state

    _truly = ParallelDrafter.draft


@pytest.mark.parametrize("kind", ["markov", "independent"])
def test_reported_law_is_the_law_drawn_from(kind):
    block = draft_once(make(kind), Sampling(), TARGET, ROWS)
    assert lawful(block, VOCAB) > 1e-2
    laws = np.asarray(block.law.probs)
    # Only with the Markov head does a law know the token before it.
    spread = np.ptp(laws[:, 1:], axis=0).max()
    assert (spread > 0.05) == (kind == "markov")


def test_a_false_report_is_found_out():
    block = draft_once(make("markov", Forgetful), Sampling(), TARGET, ROWS)
    assert lawful(block, VOCAB) < 1e-6


def decode(drafter, name: str):
    generator = np.random.default_rng(3)
    inputs = jnp.asarray(generator.integers(0, VOCAB, (ROWS, 3)), jnp.int32)
    return speculative_generate(
        TARGET,
        drafter,
        inputs,
        jnp.ones(inputs.shape, bool),
        row_keys(4, ROWS),
        verifier=Verifier(right_rule, params=jnp.int32(name == "block")),
        gamma=GAMMA,
        max_length=TOKENS + 1,
        eos_id=-1,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_has_the_targets_law(kind):
    wanted, drafter = joint_law(TARGET, TOKENS), make(kind)
    assert drafter.samples == (kind != "argmax")
    for name in ("token", "block"):
        output = decode(drafter, name)
        accepted = output.stats.accepted.sum(0) / output.stats.drafted.sum(0)
        assert 0 < accepted.min() and 0.1 < accepted.max() < 0.95
        assert chi_square_p(np.asarray(output.tokens)[:, 1:], wanted) > 1e-3


@pytest.mark.parametrize(("kind", "twin"), [("markov", Forgetful), ("argmax", Soft)])
def test_a_false_law_biases_the_output(kind, twin):
    wanted = joint_law(TARGET, TOKENS)
    for name in ("token", "block"):
        written = np.asarray(decode(make(kind, twin), name).tokens)[:, 1:]
        assert chi_square_p(written, wanted) < 1e-6


@pytest.mark.parametrize("kind", ["independent", "argmax"])
def test_shared_noise_writes_the_targets_own_sample(kind):
    rows = 300
    sources = (jnp.ones((rows, 2), jnp.int32), jnp.ones((rows, 2), bool))
    common = (*sources, row_keys(5, rows))
    options = dict(max_length=TOKENS + 1, eos_id=-1)
    plain = autoregressive_generate(TARGET, *common, **options)
    fast = speculative_generate(
        TARGET, make(kind), *common, verifier=coupled_verify, gamma=GAMMA, **options
    )
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
