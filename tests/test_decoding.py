"""What a decode reports, controls, streaming by steps, and the memory's hygiene."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    ModelDrafter,
    NgramDrafter,
    Sampling,
    autoregressive_generate,
    block_verify,
    decoding,
    speculative_generate,
    speculative_init,
    speculative_step,
    token_verify,
)
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, table_model
from specjax.sampling import with_arrays
from tests.helpers import (
    ScriptDrafter,
    hash_pair,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GREEDY = Sampling(temperature=None)
TARGET, DRAFT = hash_pair()
WIDTH, LENGTH = 9, 24


def common(rows: int):
    return *ragged_sources(0, rows, WIDTH), row_keys(0, rows)


def plain_greedy(rows: int, **options):
    options = {"max_length": LENGTH, "eos_id": -1, **options}
    return autoregressive_generate(TARGET, *common(rows), sampling=GREEDY, **options)


# What is reported.


def test_counts_of_a_hand_traced_run():
    """Accepted 3, 0, 2 with gamma 3; beside it a row that accepts all, and one none.

    Nine tokens: row 0 writes 3+1, 0+1, 2+1 and then one more; row 1 writes 4, 4 and the
    last; row 2 one at a time.
    """
    truth = plain_greedy(3).tokens
    right = jnp.array([[3, 0, 2, 0], [3, 3, 3, 3], [0, 0, 0, 0]])
    drafter = ScriptDrafter(truth=truth, right=right, length=jnp.full((3, 4), 3))
    output = speculative_generate(
        TARGET,
        drafter,
        *common(3),
        sampling=GREEDY,
        gamma=3,
        max_length=LENGTH,
        budget=9,
        eos_id=-1,
        trace=True,
    )
    np.testing.assert_array_equal(output.tokens[:, :10], truth[:, :10])
    assert not output.tokens[:, 10:].any()
    stats = output.stats
    np.testing.assert_array_equal(stats.target_calls, [4, 3, 9])
    np.testing.assert_array_equal(stats.emitted, [9, 9, 9])
    np.testing.assert_array_equal(stats.drafted, [[4] * 3, [3] * 3, [9] * 3])
    np.testing.assert_array_equal(stats.accepted, [[2, 2, 1], [3, 3, 3], [0, 0, 0]])
    # Hence: accepted / drafted = 5/12 in row 0; tokens per target call 9/4.
    np.testing.assert_array_equal(output.trace.num_accepted[0, :5], [3, 0, 2, 0, 0])
    np.testing.assert_array_equal(output.trace.next_token[0, :3], truth[0, [4, 5, 8]])


def test_counts_where_the_draft_varies():
    """Lengths 0, 2, 1: nothing is counted beyond what was drafted."""
    truth = plain_greedy(2).tokens
    drafter = ScriptDrafter(
        truth=truth,
        right=jnp.full((2, 5), 3),
        length=jnp.array([[0, 2, 1, 0, 3], [3, 3, 3, 3, 3]]),
    )
    output = speculative_generate(
        TARGET,
        drafter,
        *common(2),
        sampling=GREEDY,
        gamma=3,
        max_length=LENGTH,
        budget=7,
        eos_id=-1,
    )
    np.testing.assert_array_equal(output.tokens[:, :8], truth[:, :8])
    np.testing.assert_array_equal(output.stats.target_calls, [4, 2])
    np.testing.assert_array_equal(output.stats.drafted, [[2, 1, 0], [2, 2, 2]])
    np.testing.assert_array_equal(output.stats.accepted, [[2, 1, 0], [2, 2, 2]])


def test_verdicts_are_counted_before_the_cut_and_emitted_after_it():
    """EOS is the second of three accepted drafts."""
    truth = plain_greedy(1).tokens
    drafter = ScriptDrafter(
        truth=truth, right=jnp.full((1, 1), 3), length=jnp.full((1, 1), 3)
    )
    output = speculative_generate(
        TARGET,
        drafter,
        *common(1),
        sampling=GREEDY,
        gamma=3,
        max_length=LENGTH,
        eos_id=int(truth[0, 2]),
    )
    assert output.tokens[0, :4].tolist() == [*truth[0, :3].tolist(), 0]
    assert output.stats.emitted[0] == 2 and output.stats.target_calls[0] == 1
    np.testing.assert_array_equal(output.stats.accepted, [[1, 1, 1]])


@pytest.fixture(scope="module")
def sampled():
    """A sampled run with everything recorded; q by its own temperature and top-k."""
    return speculative_generate(
        TARGET,
        ModelDrafter(DRAFT),
        *common(5),
        sampling=Sampling(temperature=0.8),
        draft_sampling=Sampling(temperature=0.5, top_k=3),
        gamma=3,
        max_length=LENGTH,
        eos_id=2,
        log_probs=True,
        trace=True,
    )


def test_log_probs_are_those_of_the_teacher_forced_target(sampled):
    inputs, mask, _ = common(5)
    encoded = TARGET.encode(inputs, mask)
    logits, _ = TARGET.decode(sampled.tokens, None, encoded)
    scores = np.asarray(jax.nn.log_softmax(logits.logits))
    for row in range(5):
        length = int(sampled.length[row])
        wanted = np.zeros(LENGTH)
        for place in range(1, length):
            wanted[place] = scores[row, place - 1, sampled.tokens[row, place]]
        np.testing.assert_allclose(sampled.log_probs[row], wanted, atol=1e-6)


def test_trace_retells_the_output(sampled):
    trace, stats = sampled.trace, sampled.stats
    for row in range(5):
        text, drafted, accepted = [0], np.zeros(3, int), np.zeros(3, int)
        for call in range(stats.target_calls[row]):
            number = int(trace.num_accepted[row, call])
            text += trace.tokens[row, call, :number].tolist()
            text.append(int(trace.next_token[row, call]))
            drafted[: trace.length[row, call]] += 1
            accepted[:number] += 1
        length = int(sampled.length[row])
        assert text[:length] == sampled.tokens[row, :length].tolist()
        np.testing.assert_array_equal(stats.drafted[row], drafted)
        np.testing.assert_array_equal(stats.accepted[row], accepted)
        for field in jax.tree.leaves(trace):  # and nothing past the last call
            assert not field[row, stats.target_calls[row] :].any()


def test_trace_holds_the_laws_in_use(sampled):
    """q is what the token was drawn from: after temperature and top-k, not before."""
    inputs, mask, _ = common(5)
    trace, checked = sampled.trace, 0
    sides = (
        (TARGET, Sampling(temperature=0.8), trace.p),
        (DRAFT, Sampling(temperature=0.5, top_k=3), trace.q),
    )
    for model, sampling, recorded in sides:
        encoded = model.encode(inputs, mask)
        for row in range(5):
            place = 1
            for call in range(2):
                buffer = jnp.asarray(sampled.tokens).at[row, place : place + 3]
                buffer = buffer.set(trace.tokens[row, call])
                output, _ = model.decode(buffer, None, encoded)
                law = sampling.law(output.logits).probs[row]
                rows = jnp.arange(place - 1, place + 2)
                wanted = law[rows, trace.tokens[row, call]]
                np.testing.assert_allclose(recorded[row, call], wanted, rtol=1e-5)
                place += int(trace.num_accepted[row, call]) + 1
                checked += 1
    assert checked == 20 and (trace.q[:, 0] > 0).all()


# Controls.


@struct.dataclass
class Banned:
    """Never writes these ids."""

    ids: jax.Array

    def __call__(self, logits, tokens, length):
        return logits.at[self.ids].set(-jnp.inf)


@struct.dataclass
class MinLength:
    """No EOS before so many tokens stand."""

    eos_id: int
    length: int

    def __call__(self, logits, tokens, length):
        early = (jnp.arange(len(logits)) == self.eos_id) & (length < self.length)
        return jnp.where(early, -jnp.inf, logits)


@struct.dataclass
class Penalty:
    """Ids that stand already lose `size` from their logit, once per occurrence."""

    size: float

    def __call__(self, logits, tokens, length):
        real = (jnp.arange(len(tokens)) < length).astype(jnp.float32)
        return logits - self.size * jnp.zeros_like(logits).at[tokens].add(real)


def controlled(drafter, controls, **options):
    sampling = Sampling(temperature=None, controls=controls)
    settings = dict(sampling=sampling, max_length=LENGTH, eos_id=2)
    plain = autoregressive_generate(TARGET, *common(6), **settings)
    fast = speculative_generate(
        TARGET, drafter, *common(6), **{**settings, "gamma": 4, **options}
    )
    return plain, fast


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_controls_leave_greedy_output_as_plain_decoding_has_it(kind):
    """Minimum length, bans and a penalty that lets nothing repeat."""
    free = plain_greedy(6, eos_id=2)
    common_id = (
        int(np.bincount(np.asarray(free.tokens[:, 1:]).ravel())[3:].argmax()) + 3
    )
    controls = (
        Banned(ids=jnp.array([common_id])),
        MinLength(eos_id=2, length=12),
        Penalty(size=100.0),
    )
    drafter = ModelDrafter(DRAFT) if kind == "model" else NgramDrafter(max_ngram=1)
    plain, fast = controlled(drafter, controls)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    assert fast.stats.drafted.sum() > 0
    for row in range(6):
        text = fast.tokens[row, : fast.length[row]].tolist()
        assert len(set(text)) == len(text) and common_id not in text
        assert fast.length[row] >= 12
    assert not jnp.array_equal(free.tokens, plain.tokens)
    if kind == "model":
        assert 0.2 < fast.stats.accepted.sum() / fast.stats.drafted.sum() < 0.95


def test_a_penalty_that_is_updated_once_per_step_is_found_out(monkeypatch):
    """The wrong twin: every place of a block judged by the committed prefix alone."""

    @struct.dataclass
    class OwnPenalty(Penalty):  # a type of its own, so a program of its own
        pass

    right = decoding.block_prefix

    def stale(state, block):
        prefix = right(state, block)
        first = jnp.broadcast_to(prefix.length[:, :1], prefix.length.shape)
        return prefix.replace(length=first)

    monkeypatch.setattr(decoding, "block_prefix", stale)
    plain, fast = controlled(ModelDrafter(DRAFT), (OwnPenalty(size=100.0),))
    assert not jnp.array_equal(fast.tokens, plain.tokens)


def test_controls_keep_the_sampled_law():
    """Exact joint law of three tokens under a repetition penalty and a ban."""
    rows, vocab_size = 200_000, 4
    target = table_model(3, vocab_size, 2)
    draft = table_model(4, vocab_size, 2, like=target, mix=0.4)
    controls = (Banned(ids=jnp.array([2])), Penalty(size=1.0))
    output = speculative_generate(
        target,
        ModelDrafter(draft),
        jnp.zeros((rows, 1), jnp.int32),
        jnp.ones((rows, 1), bool),
        row_keys(0, rows),
        sampling=Sampling(controls=controls),
        verifier=block_verify,
        gamma=2,
        max_length=4,
        eos_id=-1,
    )
    law = np.zeros((vocab_size,) * 3)
    logits = np.asarray(target.logits, np.float64)
    for cell in np.ndindex(law.shape):
        index, value, seen = 0, 1.0, np.bincount([0], minlength=vocab_size)
        for token in cell:
            weights = np.exp(logits[index] - seen)
            weights[2] = 0
            value *= weights[token] / weights.sum()
            index, seen = index * vocab_size + token + 1, seen.copy()
            seen[token] += 1
        law[cell] = value
    samples = np.asarray(output.tokens[:, 1:])
    assert chi_square_p(samples, law) > 1e-3
    assert 0.1 < output.stats.accepted.sum() / output.stats.drafted.sum() < 0.95
    once = as_table(np.exp(logits), 2)  # the twin: without the penalty
    other = np.exp(np.asarray(once.logits))
    assert chi_square_p(samples[:, :1], other[0] * [1, 1, 0, 1]) < 1e-6


# Steps, streaming, memory.


INIT = jax.jit(speculative_init, static_argnames=("gamma", "max_length"))
STEP = jax.jit(speculative_step, static_argnames="gamma")


def steps(target, drafter, rows, sampling, *, gamma=3, budget=12, between=None):
    """Yields the state after each step, driven from Python."""
    inputs, mask, keys = common(rows)
    sampling = with_arrays(sampling)
    encoded, state = INIT(
        target,
        drafter,
        inputs,
        mask,
        gamma=gamma,
        max_length=LENGTH,
        budget=jnp.full(rows, budget),
        prefix=jnp.zeros((rows, 1), jnp.int32),
        prefix_length=jnp.ones(rows, jnp.int32),
    )
    while not state.done.all():
        state = STEP(
            target,
            drafter,
            encoded,
            keys,
            state,
            sampling=sampling,
            draft_sampling=sampling,
            gamma=gamma,
            eos_id=2,
        )
        yield state
        if between is not None:
            state = between(state)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), pytest.param(GREEDY, marks=SLOW)]
)
def test_streaming_by_steps_equals_generate(sampling):
    """Blocks joined are the output, EOS included, and nothing is taken back."""
    drafter = ModelDrafter(DRAFT)
    output = speculative_generate(
        TARGET,
        drafter,
        *common(3),
        sampling=sampling,
        gamma=3,
        max_length=LENGTH,
        budget=12,
        eos_id=2,
    )
    streamed, seen = [[0] for _ in range(3)], [1] * 3
    for state in steps(TARGET, drafter, 3, sampling):
        np.testing.assert_array_equal(state.cache.length, state.length - 1)
        for row in range(3):
            length = int(state.length[row])
            assert 0 <= length - seen[row] <= 4
            streamed[row] += state.tokens[row, seen[row] : length].tolist()
            seen[row] = length
    for row in range(3):
        assert streamed[row] == output.tokens[row, : output.length[row]].tolist()
        assert not output.tokens[row, output.length[row] :].any()
    for one, two in zip(
        jax.tree.leaves(state.stats), jax.tree.leaves(output.stats), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_stale_slots_are_never_read():
    """Everything past the valid slots, of target and draft, is filled with 1e4."""
    target = tiny_t5(0)
    drafter = ModelDrafter(perturbed(target, 1, 0.1))

    def poisoned(cache):
        def fill(memory):
            slots = jnp.arange(memory.shape[2])[None, None, :, None]
            stale = slots >= cache.length[:, None, None, None]
            return jnp.where(stale, jnp.float32(1e4), memory)

        return cache.replace(memory=jax.tree.map(fill, cache.memory))

    @jax.jit
    def poison(state):
        draft = state.draft_state.replace(cache=poisoned(state.draft_state.cache))
        return state.replace(cache=poisoned(state.cache), draft_state=draft)

    clean = list(steps(target, drafter, 2, GREEDY))
    dirty = list(steps(target, drafter, 2, GREEDY, between=poison))
    assert len(clean) == len(dirty) > 2
    for one, two in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.stats.accepted, two.stats.accepted)
    accepted, drafted = one.stats.accepted.sum(), one.stats.drafted.sum()
    assert 0 < accepted < drafted


@SLOW
@pytest.mark.parametrize("verifier", [token_verify, block_verify])
def test_with_and_without_jit(verifier):
    arguments = (TARGET, ModelDrafter(DRAFT), *common(2))
    options = dict(
        verifier=verifier,
        sampling=Sampling(temperature=0.5),
        gamma=2,
        max_length=8,
        budget=3,
        eos_id=-1,
    )
    compiled = speculative_generate(*arguments, **options)
    with jax.disable_jit():
        eager = speculative_generate(*arguments, **options)
    for one, two in zip(jax.tree.leaves(compiled), jax.tree.leaves(eager), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_greedy_target_may_have_a_sampled_draft():
    """The draft's sampling changes what is accepted, never what is written."""
    output = speculative_generate(
        TARGET,
        ModelDrafter(DRAFT),
        *common(4),
        sampling=GREEDY,
        draft_sampling=Sampling(temperature=1.5),
        gamma=3,
        max_length=LENGTH,
        eos_id=-1,
    )
    np.testing.assert_array_equal(output.tokens, plain_greedy(4).tokens)
    assert 0 < output.stats.accepted.sum() < output.stats.drafted.sum()
