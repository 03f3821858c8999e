"""Rules of the draft's length: what each decides, and what the loop makes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import (
    ModelDrafter,
    Sampling,
    autoregressive_generate,
    block_verify,
    decoding,
    speculative_generate,
    theory,
)
from specjax.drafters.base import Committed
from specjax.drafters.chain import Signal
from specjax.drafters.lengths import (
    AcceptanceStop,
    Bandit,
    Confidence,
    EntropyBound,
    Fixed,
    Heuristic,
    check_rule,
)
from specjax.drafters.optimal_length import Optimal
from specjax.errors import InputError
from specjax.types import Noise
from specjax.verify import coupled_verify
from tests.helpers import (
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)
from tests.lengths import Each, Seeing, head, rules

TARGET, DRAFT = hash_pair()
RULES = rules(64)
ROWS, LENGTH, GAMMA = 2 * len(RULES), 24, 5
EACH = Each(
    tuple(RULES.values()), jnp.arange(ROWS, dtype=jnp.int32) % jnp.int32(len(RULES))
)


def sources():
    return *ragged_sources(2, ROWS, 9), row_keys(9, ROWS)


def decode(rule, *arguments, **options):
    options = {"eos_id": 2, "max_length": LENGTH, "gamma": GAMMA} | options
    drafter = ModelDrafter(Seeing(DRAFT), rule)
    return speculative_generate(TARGET, drafter, *arguments, **options)


def plain(**options):
    options = {"eos_id": 2, "max_length": LENGTH} | options
    return autoregressive_generate(TARGET, *sources(), **options)


def test_greedy_identity():
    """Token for token, with drafts of every rule accepted, rejected and cut short."""
    greedy = Sampling(temperature=None)
    output = decode(EACH, *sources(), sampling=greedy)
    np.testing.assert_array_equal(output.tokens, plain(sampling=greedy).tokens)
    drafted, accepted, calls = (
        np.asarray(own).reshape(2, len(RULES), -1).sum((0, 2))
        for own in (
            output.stats.drafted,
            output.stats.accepted,
            output.stats.target_calls,
        )
    )
    assert (0 < accepted).all() and (accepted < drafted).all()
    assert (drafted < GAMMA * calls).all()


@pytest.mark.slow
def test_shared_noise_gives_the_autoregressive_sample():
    warm = Sampling(temperature=0.7)
    output = decode(EACH, *sources(), verifier=coupled_verify, sampling=warm)
    np.testing.assert_array_equal(output.tokens, plain(sampling=warm).tokens)
    assert 0 < output.stats.accepted.sum() < output.stats.drafted.sum()


@pytest.mark.slow
def test_rows_are_independent():
    """However long the others go on: tokens, counts and what was drafted."""
    options = dict(
        sampling=Sampling(temperature=0.5), verifier=block_verify, trace=True
    )
    output = decode(EACH, *sources(), **options)
    order = np.random.default_rng(0).permutation(ROWS)
    alone = [np.full(ROWS, row) for row in range(0, ROWS, 3)]  # but for copies
    for rows in (order, *alone):
        rule = EACH.replace(which=EACH.which[rows])
        other = decode(rule, *(own[rows] for own in sources()), **options)
        for one, two in zip(
            jax.tree.leaves(output), jax.tree.leaves(other), strict=True
        ):
            np.testing.assert_allclose(one[rows], two, rtol=1e-5)


def test_nothing_is_kept_between_calls_and_settings_compile_nothing():
    def run(threshold: float, seed: int = 0):
        arms = (Confidence(threshold), EntropyBound(start=threshold), Heuristic())
        inputs, mask, keys = sources()
        rule = Bandit((*arms, Optimal(cost=threshold)))
        return decode(rule, inputs, mask, row_keys(seed, ROWS))

    first = run(0.5)
    before = decoding._speculative_loop._cache_size()
    other, again = run(0.3, seed=4), run(0.5)
    assert decoding._speculative_loop._cache_size() == before
    assert not jnp.array_equal(other.stats.drafted, first.stats.drafted)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)


# One block.


@struct.dataclass
class Counting:
    """A model that counts its decoder passes, in a memory that no rollback touches."""

    model: Any

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def encode(self, inputs, mask, *, dropout_key=None):
        return self.model.encode(inputs, mask)

    def init_cache(self, batch_size, size):
        cache = self.model.init_cache(batch_size, size)
        return cache.replace(memory=(cache.memory, jnp.zeros(batch_size, jnp.int32)))

    def decode(self, tokens, cache, encoded, *, taps=(), **options):
        memory, passes = cache.memory
        inner = cache.replace(memory=memory)
        output, inner = self.model.decode(tokens, inner, encoded, **options)
        return output, inner.replace(memory=(inner.memory, passes + 1))


def one_block(rule, sampling=Sampling(), rows=3, done=None, model=DRAFT):  # noqa: B008
    """A block after a first one that was judged, its passes, and the state after it."""
    inputs, mask = ragged_sources(0, rows, 6)
    tokens, length = jnp.zeros((rows, 20), jnp.int32), jnp.ones(rows, jnp.int32)
    drafter = ModelDrafter(Counting(model), rule)

    @jax.jit
    def run(drafter, done):
        encoded = TARGET.encode(inputs, mask)
        state = drafter.init(
            TARGET, encoded, inputs, mask, tokens[:, :1], length, tokens.shape[1]
        )
        state = drafter.commit(
            state,
            Committed(
                tokens=tokens,
                length=length,
                num_accepted=jnp.zeros_like(length),
                done=done,
            ),
        )
        noise = Noise(keys=row_keys(1, rows), start=length - 1)
        return drafter.draft(
            TARGET, noise, state, tokens, length, gamma=GAMMA, sampling=sampling
        )

    block, state = run(drafter, done)
    return block, np.unique(state.cache.memory[1]).tolist(), state


def test_passes_are_those_of_the_longest_live_row():
    lengths = Fixed(jnp.array([2, 4, 1]))
    block, passes, _ = one_block(lengths)
    assert block.length.tolist() == [2, 4, 1] and passes == [4]
    block, passes, _ = one_block(lengths, done=jnp.array([False, True, False]))
    assert block.length.tolist() == [2, 0, 1] and passes == [2]
    assert not block.tokens[1].any() and not block.law.probs[1].any()
    _, passes, _ = one_block(Fixed(1))
    assert passes == [1]
    _, passes, _ = one_block(Confidence(1.0))  # no law is a point
    assert passes == [1]
    block, passes, _ = one_block(None)
    assert passes == [GAMMA] and (block.length == GAMMA).all()


@pytest.mark.slow
def test_a_whole_block_is_that_without_a_rule():
    for sampling in (Sampling(), Sampling(temperature=None), Sampling(top_k=3)):
        block, _, _ = one_block(None, sampling)
        ruled, _, _ = one_block(Fixed(99), sampling)
        assert jax.tree.structure(block) == jax.tree.structure(ruled)
        for one, two in zip(
            jax.tree.leaves(block), jax.tree.leaves(ruled), strict=True
        ):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("temperature", [None, 0.0, 0.5])
def test_confidence_ends_with_the_unsure_token(temperature):
    """Greedily too, where the law says 1 of every token: by that of temperature 1."""
    sampling, rows = Sampling(temperature=temperature), 12
    whole, _, _ = one_block(None, sampling, rows)
    inputs, mask = ragged_sources(0, rows, 6)
    fed = jnp.pad(whole.tokens, ((0, 0), (1, 0)))[:, :-1]
    output, _ = DRAFT.decode(fed, None, DRAFT.encode(inputs, mask))
    law = Sampling(temperature=temperature or 1.0).law(output.logits)
    confidence = np.asarray(law.at(whole.tokens))
    threshold = float(np.quantile(confidence, 0.3))
    sure = confidence >= threshold
    wanted = np.minimum(np.cumprod(sure, axis=1).sum(1) + 1, GAMMA)
    assert len(np.unique(wanted)) > 1
    block, passes, _ = one_block(Confidence(threshold), sampling, rows)
    np.testing.assert_array_equal(block.length, wanted)
    assert passes == [wanted.max()]
    kept = np.arange(GAMMA)[None] < wanted[:, None]
    np.testing.assert_array_equal(block.tokens, np.where(kept, whole.tokens, 0))


# Rules by themselves.


def signal(probs, token=0, depth=1, hidden=None) -> Signal:
    """Of as many rows as `probs` has."""
    probs = jnp.asarray(probs, jnp.float32)
    token = jnp.full(len(probs), token, jnp.int32)
    return Signal(jnp.int32(depth), token, probs, hidden)


def block(rule, state, signals, num_accepted, gamma=GAMMA):
    """Drafts one block of one row: its length, and the state after its verdict."""
    most, state = rule.begin(state, gamma)
    most, length = min(int(jnp.min(most)), gamma), 1
    for depth in range(1, most + 1):
        length = depth
        goes_on, state = rule.go_on(state, signals(depth))
        if depth == most or not goes_on[0]:
            break
    accepted = min(num_accepted(length), length)
    return length, rule.commit(state, jnp.array([length]), jnp.array([accepted]))


def sure(confidence):
    """Every token of every block has this probability."""
    return lambda depth: signal([[confidence, 1 - confidence]], depth=depth)


def test_heuristic():
    rule, lengths = Heuristic(start=3), []
    state = rule.init(1)
    for accepted in (9, 9, 0, 0, 9, 0, 0, 0, 0, 0, 0):
        length, state = block(rule, state, sure(0.5), lambda _, own=accepted: own)
        lengths.append(length)
    # +2 after all stood, -1 else, between 1 and gamma.
    assert lengths == [3, 5, 5, 4, 3, 5, 4, 3, 2, 1, 1]


def test_entropy_bound():
    law = [0.7, 0.2, 0.1]
    entropy = -sum(p * np.log(p) for p in law)
    bound = 1 - np.sqrt(0.2 * entropy)
    for start, goes_on in ((bound - 0.01, True), (bound + 0.01, False)):
        rule = EntropyBound(start=start)
        _, state = rule.begin(rule.init(1), GAMMA)
        assert rule.go_on(state, signal([law]))[0].tolist() == [goes_on]
    # A law with zeros is the surest there is.
    rule = EntropyBound(start=1.0)
    _, state = rule.begin(rule.init(1), GAMMA)
    assert rule.go_on(state, signal([[1.0, 0.0]]))[0].tolist() == [True]


def test_entropy_bound_follows_what_is_accepted():
    rule = EntropyBound(start=0.5, step=0.1, memory=0.5, aim=0.9)
    _, state = rule.begin(rule.init(1), GAMMA)

    def told(state, drafted, accepted):
        state = rule.commit(state, jnp.array([drafted]), jnp.array([accepted]))
        return state, round(float(state.bound[0]), 4)

    state, bound = told(state, 2, 2)
    assert bound == 0.4  # all stood: longer drafts
    state, bound = told(state, GAMMA, GAMMA)
    assert bound == 0.4  # they are as long as they can be
    state, bound = told(state, 4, 0)
    assert bound == 0.5 and float(state.rate[0]) == 0.5
    state, bound = told(state, 2, 2)
    assert bound == 0.6  # 0.75 on average is still less than 0.9


def test_acceptance_accumulates():
    half = head(3).replace(outer=jnp.zeros(4), outer_bias=jnp.zeros(()))
    hidden = jnp.ones((1, 3))

    def signals(depth):
        return signal([[0.5, 0.5]], depth=depth, hidden=hidden)

    for threshold, wanted in ((0.4, 1), (0.5, 2), (0.7, 2), (0.76, 3), (1.0, GAMMA)):
        rule = AcceptanceStop(half, threshold)
        state = rule.init(1)
        for _ in range(2):  # a block begins anew
            length, state = block(rule, state, signals, lambda length: length)
            assert length == wanted, threshold


def test_bandit_tries_all_then_takes_the_best():
    rule = Bandit((Fixed(1), Heuristic(start=4), Fixed(2)), explore=0.02)
    state, lengths = rule.init(1), []
    for _ in range(12):
        length, state = block(rule, state, sure(0.5), lambda _: 2)
        lengths.append(length)
    # Two of each block stand: all of Fixed(2)'s, and more of gamma than of Fixed(1)'s.
    assert lengths[:3] == [1, 4, 2] and lengths[3:] == [2] * 9
    assert state.pulls.tolist() == [[1, 1, 10]]
    reward = 0.5 * 2 / GAMMA + 0.5 * 2 / 4
    np.testing.assert_allclose(state.reward[0, 1], reward, rtol=1e-6)
    # Its own block alone taught the heuristic.
    assert state.rules[1].tolist() == [3]


def test_bandit_explores():
    rule, chosen = Bandit((Fixed(1), Fixed(2)), explore=1.0), []
    state = rule.init(1)
    for _ in range(40):
        length, state = block(rule, state, sure(0.5), lambda _: 2)
        chosen.append(length)
    pulls = chosen.count(1)
    assert 3 < pulls < 20  # the worse one less and less often


@pytest.mark.slow
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5, 1.5])
@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.9])
def test_optimal_finds_the_best_gamma(alpha, cost):
    """Of tokens that stand or fall alike it is the one that the theory names."""
    generator, gamma = np.random.default_rng(0), 12
    rule = Optimal(cost=cost, prior=0.6)
    begin, go_on, commit = (jax.jit(f) for f in (_begin(gamma), _go_on, rule.commit))
    state, lengths = rule.init(1), []
    for _ in range(400):
        state = begin(rule, state)
        for length in range(1, gamma + 1):
            goes_on, state = go_on(rule, state, sure(0.7)(length))
            if not goes_on[0]:
                break
        accepted = min(int(generator.geometric(1 - alpha)) - 1, length)
        state = commit(state, jnp.array([length]), jnp.array([accepted]))
        lengths.append(length)
    best = max(theory.best_gamma(alpha, cost, gamma), 1)
    worth = theory.walltime_factor(alpha, np.array([np.mean(lengths[200:])]), cost)
    assert worth > 0.98 * theory.walltime_factor(alpha, best, cost), lengths[-1]


def _begin(gamma):
    return lambda rule, state: rule.begin(state, gamma)[1]


def _go_on(rule, state, own):
    return rule.go_on(state, own)


def test_optimal_tells_sure_tokens_from_others():
    """What the draft is sure of stands, and nothing else does."""
    rule = Optimal(cost=0.2)
    state = rule.init(1)
    for turn in range(30):
        confidence = 0.99 if turn % 2 else 0.4
        stands = GAMMA if turn % 2 else 0
        length, state = block(rule, state, sure(confidence), lambda _, n=stands: n)
        if turn >= 20:
            assert length == (GAMMA if turn % 2 else 1)


def test_optimal_goes_deep_again():
    """Depths that a bad stretch kept from being tried are not given up."""
    rule = Optimal(cost=0.2)
    state = rule.init(1)
    for _ in range(20):
        length, state = block(rule, state, sure(0.9), lambda _: 0)
    assert length == 1
    for _ in range(40):
        length, state = block(rule, state, sure(0.9), lambda length: length)
    assert length >= GAMMA - 1


def test_optimal_costs():
    for cost, wanted in ((0.0, GAMMA), (50.0, 1)):
        rule = Optimal(cost=cost)
        assert block(rule, rule.init(1), sure(0.9), lambda _: 0)[0] == wanted
    rule = Optimal(cost=0.0, growth=50.0)
    assert block(rule, rule.init(1), sure(0.9), lambda _: 0)[0] == 1


WRONG = {
    "rule.length is 0": Fixed(0),
    "rule.length is 1.5": Fixed(1.5),
    "rule.start is 0": Heuristic(start=0),
    "rule.threshold is 1.5: it must be from 0 to 1": Confidence(1.5),
    "rule.threshold is nan": Confidence(float("nan")),
    "rule.kappa is 0": EntropyBound(kappa=0.0),
    "rule.cost is -1": Optimal(cost=-1.0),
    "rule.verify is 0": Optimal(cost=0.1, verify=0.0),
    "rule.explore is -1": Bandit((Fixed(1), Fixed(2)), explore=-1),
    r"rule.rules\[1\].threshold is 2": Bandit((Fixed(1), Confidence(2.0))),
    "a bandit chooses among two": Bandit((Fixed(1),)),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_means_nothing_is_refused(sentence):
    with pytest.raises(InputError, match=sentence):
        check_rule(WRONG[sentence], "rule")
    # Decoding refuses it too, before anything is traced.
    with pytest.raises(InputError, match=f"drafter.{sentence}|a bandit chooses"):
        decode(WRONG[sentence], *sources())


def test_lengths_must_be_one_per_row():
    with pytest.raises(InputError, match="one number or one per row"):
        decode(Fixed(jnp.array([1, 2])), *sources())
