"""A cascade drafts what its model would draft alone, in fewer passes of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    InputError,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    TreeDrafter,
    Verifier,
    autoregressive_generate,
    speculative_generate,
    token_verify,
)
from specjax.drafters.cascade import CascadeDrafter, expected_passes
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, joint_law, num_prefixes, table_model
from specjax.types import Noise
from specjax.verify import coupled_verify, exact_match_verify, lenient
from tests.drafters import laws
from tests.drafters.test_conformance import commit_and_draft, draft_once, lawful
from tests.helpers import (
    HashModel,
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)
from tests.twins import FLAWS, RIGHT_RULES, TwinDrafter, right_rule

ROWS = 60_000
TARGET = table_model(0, 4, 3, zeros=0.2)
MODEL = table_model(1, 4, 3, zeros=0.15, like=TARGET, mix=0.5)
INNER = table_model(2, 4, 3, zeros=0.1, like=MODEL, mix=0.5)
GREEDY = Sampling(temperature=None)


def rule(name: str) -> Verifier:
    return Verifier(right_rule, params=jnp.int32(RIGHT_RULES.index(name)))


def over_model(gamma_inner: int = 2, by: str = "block_rule") -> CascadeDrafter:
    return CascadeDrafter(MODEL, ModelDrafter(INNER), gamma_inner, rule(by))


@pytest.mark.slow
@pytest.mark.parametrize("by", RIGHT_RULES)
def test_joint_law(by):
    """Both rules outside, both inside; the inner drafter's law is no law of a block."""
    laws.check_joint_law(TARGET, TARGET, over_model(by=by), INNER, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["ngram", "stops", "exact match", "wider", "twofold"])
def test_joint_law_of_other_inner_drafters(inner):
    """Inner blocks of varying length, none, without a law; a model of more ids."""
    model, verifier, width = MODEL, rule("block_rule"), 2
    if inner == "ngram":
        drafter, width = NgramDrafter(), 3
    elif inner == "stops":
        keep = jnp.int32(FLAWS.index("keep"))
        drafter = TwinDrafter(ModelDrafter(INNER), keep, row_keys(99, ROWS))
        width = 3
    elif inner == "exact match":
        drafter, verifier = ModelDrafter(INNER), exact_match_verify
    elif inner == "wider":
        model, drafter = table_model(3, 6, 3), ModelDrafter(table_model(4, 5, 3))
    else:
        drafter = CascadeDrafter(INNER, NgramDrafter(), 1)
    cascade = CascadeDrafter(model, drafter, width, verifier)
    generator = np.random.default_rng(3)
    inputs = generator.integers(0, 4, (ROWS, 6))
    laws.check_joint_law(TARGET, TARGET, cascade, INNER, ROWS, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("gamma_inner", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_blocks_have_the_models_law(gamma_inner):
    """Each token follows the law that is reported, and that is the model's own."""
    target, cascade = table_model(8, 4, 5), over_model(gamma_inner)
    model = table_model(5, 4, 5)
    inner = ModelDrafter(table_model(6, 4, 5, like=model, mix=0.7))
    cascade = cascade.replace(model=model, inner=inner)
    block = draft_once(cascade, Sampling(), target, 20_000)
    assert (block.length == 3).all()
    assert lawful(block, 4) > 1e-2
    lying = laws.Misreported(cascade, model, jnp.array(True))
    told = draft_once(lying, Sampling(), target, 20_000)
    np.testing.assert_array_equal(told.tokens, block.tokens)
    np.testing.assert_allclose(told.law.probs, block.law.probs, atol=1e-6)
    false = laws.Misreported(cascade, inner.model, jnp.array(True))
    assert lawful(draft_once(false, Sampling(), target, 20_000), 4) < 1e-6


@struct.dataclass
class SameNoise(CascadeDrafter):
    """A wrong twin: every round sees the noise of the first."""

    def _noise(self, noise, number, text, purpose):
        return super()._noise(noise, jnp.array(1), text, purpose)


@pytest.mark.slow
def test_noise_that_is_used_twice_is_found_out():
    inputs = jnp.zeros((ROWS, 3), jnp.int32)
    output = speculative_generate(
        TARGET,
        SameNoise(MODEL, ModelDrafter(INNER), 1, token_verify),
        inputs,
        jnp.ones(inputs.shape, bool),
        row_keys(5, ROWS),
        gamma=3,
        max_length=5,
        eos_id=-1,
    )
    law = joint_law(TARGET, 4)
    assert chi_square_p(np.asarray(output.tokens)[:, 1:], law) < 1e-6


def hash_cascade(inner_noise: float = 0.4, gamma_inner: int = 2, width: int = 64):
    """Target, model, and a cascade of an inner model that often agrees."""
    target, model = hash_pair(draft_vocab=width)
    other = np.random.default_rng(1).normal(size=model.table.shape)
    inner = HashModel(model.table + inner_noise * jnp.asarray(other, jnp.float32))
    return target, model, CascadeDrafter(model, ModelDrafter(inner), gamma_inner)


def decode(target, drafter, rows=7, **options):
    inputs, mask = ragged_sources(0, rows, 9)
    options = dict(gamma=4, max_length=28, eos_id=-1) | options
    return speculative_generate(
        target, drafter, inputs, mask, row_keys(0, rows), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gamma_inner", "width"), [(1, 64), (2, 70), (5, 60)])
def test_greedy_text_and_blocks(gamma_inner, width):
    """The target's text, from blocks that are those of the model alone."""
    target, model, cascade = hash_cascade(gamma_inner=gamma_inner, width=width)
    inputs, mask = ragged_sources(0, 7, 9)
    plain = autoregressive_generate(
        target, inputs, mask, row_keys(0, 7), sampling=GREEDY, max_length=28, eos_id=-1
    )
    fast = decode(target, cascade, sampling=GREEDY)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
    alone = decode(target, ModelDrafter(model), sampling=GREEDY)
    jax.tree.map(np.testing.assert_array_equal, fast.stats, alone.stats)


@pytest.mark.slow
def test_shared_noise_gives_the_models_own_draws():
    """Where noise is of the position, tokens are those of the model drafting alone."""
    target, model, cascade = hash_cascade()
    fast = decode(target, cascade, verifier=coupled_verify)
    alone = decode(target, ModelDrafter(model), verifier=coupled_verify)
    np.testing.assert_array_equal(fast.tokens, alone.tokens)
    jax.tree.map(np.testing.assert_array_equal, fast.stats, alone.stats)
    assert 0.2 < fast.stats.accepted.sum() / fast.stats.drafted.sum() < 0.95
    # Noise of the step would draft other tokens.
    assert (decode(target, cascade).tokens != alone.tokens).any()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, top_k=20), GREEDY])
def test_commit_rolls_both_memories_back(sampling):
    target, _, cascade = hash_cascade(gamma_inner=1)
    commit_and_draft(cascade, sampling, target, 64, atol=0)


@struct.dataclass
class Lagging(CascadeDrafter):
    """A wrong twin: the inner memory lacks what its drafter has not fed."""

    def draft(self, *arguments, **settings):
        block, state = super().draft(*arguments, **settings)
        cache = state.inner.cache
        last = cache.length[:, None] - 2
        rows = jnp.arange(len(last))[:, None]
        cache = cache.replace(memory=cache.memory.at[rows, last].set(5))
        return block, state.replace(inner=state.inner.replace(cache=cache))


def test_a_token_that_was_not_fed_is_found_out():
    target, _, cascade = hash_cascade(gamma_inner=1)
    twin = Lagging(cascade.model, cascade.inner, 1)
    with pytest.raises(AssertionError):
        commit_and_draft(twin, Sampling(), target, 64, atol=0)


@struct.dataclass
class NotTwice:
    """A control: bans the token that stands last."""

    def __call__(self, logits, tokens, length):
        last = tokens[jnp.maximum(length - 1, 0)]
        return jnp.where(jnp.arange(len(logits)) == last, -jnp.inf, logits)


@pytest.mark.slow
def test_controls_read_the_drafted_tokens():
    target, model, cascade = hash_cascade()
    sampling = Sampling(temperature=3.0, controls=(NotTwice(),))
    output = decode(target, cascade, sampling=sampling, trace=True)
    assert (output.tokens[:, 1:] != output.tokens[:, :-1]).all()
    drafted = np.asarray(output.trace.tokens)
    real = np.asarray(output.trace.length) > 0
    assert (drafted[..., 1:] != drafted[..., :-1])[real].all()


@pytest.mark.slow
def test_rows_stand_alone():
    target, _, cascade = hash_cascade()
    laws.check_rows(target, cascade)
    laws.check_rows(target, cascade.replace(inner=NgramDrafter()))


def test_passes_are_counted_and_predicted():
    """Where each inner token stands with one chance, as many passes as the formula."""
    rows, gamma = 20_000, 4
    one, two = [0.5, 0.2, 0.2, 0.1], [0.3, 0.4, 0.1, 0.2]
    table = [as_table([law] * num_prefixes(4, 1), 1) for law in (one, two)]
    alpha = sum(min(p, q) for p, q in zip(one, two, strict=True))
    for width in (1, 3):
        cascade = CascadeDrafter(table[0], ModelDrafter(table[1]), width, token_verify)
        state = after_a_block(cascade, rows, gamma)
        passes = np.asarray(state.passes)
        assert (state.blocks == 1).all() and passes.max() <= gamma
        expected = expected_passes(alpha, gamma, width)
        assert abs(passes.mean() - expected) < 5 * passes.std() / rows**0.5
        assert abs(passes.mean() - expected_passes(0.8, gamma, width)) > 0.05
    assert expected_passes(0.0, 5, 3) == 5 and expected_passes(1.0, 8, 3) == 2
    with pytest.raises(InputError, match="alpha is 1.5"):
        expected_passes(1.5, 5, 3)


def after_a_block(cascade, rows: int, gamma: int):
    inputs, tokens = jnp.zeros((rows, 2), jnp.int32), jnp.zeros((rows, 8), jnp.int32)
    mask, length = jnp.ones((rows, 2), bool), jnp.ones(rows, jnp.int32)

    @jax.jit
    def run(cascade):
        encoded = TARGET.encode(inputs, mask)
        state = cascade.init(TARGET, encoded, inputs, mask, tokens[:, :1], length, 8)
        noise = Noise(keys=row_keys(1, rows), start=length - 1)
        return cascade.draft(
            TARGET, noise, state, tokens, length, gamma=gamma, sampling=Sampling()
        )[1]

    return run(cascade)


@struct.dataclass
class Tapping(ModelDrafter):
    taps = (0,)


@struct.dataclass
class Lawless(NgramDrafter):
    has_law = False


def test_what_cannot_be_used_is_refused():
    tree = TreeDrafter(INNER, (-1, 0, 0))
    for inner, changes, message in (
        (tree, {}, "TreeDrafter drafts trees"),
        (Tapping(INNER), {}, "Tapping reads what its target made"),
        (NgramDrafter(), {"gamma_inner": 0}, "gamma_inner is 0"),
        (NgramDrafter(), {"verifier": lenient(0.5)}, "must be lossless"),
        (NgramDrafter(), {"verifier": coupled_verify}, "noise of the step"),
        (Lawless(), {}, "reads the law of Lawless.*exact_match_verify"),
    ):
        cascade = CascadeDrafter(MODEL, inner).replace(**changes)
        with pytest.raises(InputError, match=message):
            after_a_block(cascade, rows=2, gamma=2)
