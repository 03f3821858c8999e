"""Verification rules on hand values, forced randomness and expectations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import block_verify, token_verify
from specjax.proof.statistics import chi_square_p
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, block_rule, chain, greedy_rule, token_rule
from tests.helpers import (
    quick_compile,  # noqa: F401
    row_keys,
)
from tests.twins import epsilon_ratio, written_out_block

RULES = [token_rule, block_rule]
both_rules = pytest.mark.parametrize("rule", RULES)

# All cases are padded to one shape, so that few programs are compiled.
GAMMA, VOCAB = 3, 4


def padded(tokens, q, p, length=None) -> tuple[DraftBlock, Scored]:
    """A block and its laws with impossible or certain things past their ends."""
    length = len(tokens) if length is None else length
    full_q, full_p = np.eye(VOCAB)[[0] * GAMMA], np.eye(VOCAB)[[3] * (GAMMA + 1)]
    for full, rows in ((full_q, np.asarray(q)), (full_p, np.asarray(p))):
        full[: len(rows)] = 0
        full[: len(rows), : rows.shape[1]] = rows
    tokens = jnp.asarray([*tokens, *[0] * (GAMMA - len(tokens))], jnp.int32)
    law = Law(probs=jnp.asarray(full_q, jnp.float32))
    block = DraftBlock(tokens=tokens, length=jnp.int32(length), law=law)
    return block, scored_of(full_p)


def scored_of(p) -> Scored:
    p = jnp.asarray(p, jnp.float32)
    return Scored(law=Law(probs=p), logits=jnp.log(p))


@functools.cache
def compiled(rule, forced: bool):
    """The rule, with all its uniform numbers set to an argument where `forced`."""

    @jax.jit
    def run(key, block, scored, uniform):
        noise = Noise(keys=key, start=jnp.int32(0))
        with pytest.MonkeyPatch.context() as patch:
            if forced:
                full = lambda _, gamma: jnp.full(gamma, uniform)  # noqa: E731
                patch.setattr(chain, "uniforms", full)
            return rule(noise, block, scored, None)

    return run


def judge(rule, tokens, q, p, seed=0, length=None, uniform=None) -> tuple[int, int]:
    run = compiled(rule, uniform is not None)
    uniform = jnp.float32(0 if uniform is None else uniform)
    verdict = run(jax.random.key(seed), *padded(tokens, q, p, length), uniform)
    return int(verdict.num_accepted), int(verdict.next_token)


def random_laws(
    seed: int, gamma: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    q = generator.dirichlet(np.ones(vocab_size), gamma)
    p = generator.dirichlet(np.ones(vocab_size), gamma + 1)
    return q, p


@functools.cache
def simulator(rule):
    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def run(key, block, scored):
        draft_key, verify_key = jax.random.split(key)
        keys = jax.random.split(draft_key, GAMMA)
        tokens = jax.vmap(jax.random.categorical)(keys, jnp.log(block.law.probs))
        noise = Noise(keys=verify_key, start=jnp.int32(0))
        drafted = block.replace(tokens=tokens.astype(jnp.int32))
        return rule(noise, drafted, scored, None)

    return run


def simulate(rule, q, p, length=None):
    """Accepted numbers and next tokens over drafts that really follow `q`."""
    length = len(q) if length is None else length
    block, scored = padded([0] * len(q), q, p, length)
    verdict = simulator(rule)(row_keys(0, 50_000), block, scored)
    return np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


TOY_Q, TOY_P = [[2 / 3, 1 / 3]] * 2, [[1 / 3, 2 / 3]] * 3


@pytest.mark.parametrize(
    ("rule", "expected"), [(token_rule, 10 / 9), (block_rule, 11 / 9)]
)
def test_expected_tokens_of_the_toy(rule, expected):
    """Sun et al.'s context-free example: E[accepted] 10/9 and 11/9."""
    accepted, _ = simulate(rule, TOY_Q, TOY_P)
    assert abs(accepted.mean() - expected) < 0.01


def test_block_never_accepts_less():
    gains = []
    for seed in range(4):
        q, p = random_laws(seed, 3, 4)
        token, _ = simulate(token_rule, q, p)
        block, _ = simulate(block_rule, q, p)
        gains.append(block.mean() - token.mean())
    assert min(gains) > -0.02 and max(gains) > 0.05, gains


def test_block_gains_nothing_with_one_hot_drafts():
    q = np.eye(4)[[2, 0, 3]]
    _, p = random_laws(7, 3, 4)
    token, _ = simulate(token_rule, q, p)
    block, _ = simulate(block_rule, q, p)
    expected = p[0, 2] * (1 + p[1, 0] * (1 + p[2, 3]))
    assert abs(token.mean() - expected) < 0.01 and abs(block.mean() - expected) < 0.01


def test_block_of_one_is_the_token_rule():
    for seed in range(3):
        q, p = random_laws(seed, 1, 4)
        for one, other in zip(
            simulate(token_rule, q, p),
            simulate(block_rule, q, p),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)


def test_block_rule_equals_the_one_written_out_place_by_place():
    """For every length, with laws that have holes."""
    generator = np.random.default_rng(1)
    compared = jax.jit(
        jax.vmap(
            lambda keys, tokens, length, q, p: [
                rule(
                    Noise(keys=keys, start=jnp.int32(0)),
                    DraftBlock(tokens=tokens, length=length, law=Law(probs=q)),
                    Scored(law=Law(probs=p), logits=p),
                    None,
                )
                for rule in (block_rule, written_out_block)
            ]
        )
    )
    rows, gamma, vocab_size = 20_000, 4, 5
    q = generator.dirichlet(np.ones(vocab_size), (rows, gamma))
    p = generator.dirichlet(np.ones(vocab_size), (rows, gamma + 1))
    p = np.where(generator.random(p.shape) < 0.2, 0, p) + 1e-12
    mixed = generator.random(rows) < 0.5
    p[:, :-1] = np.where(mixed[:, None, None], 0.3 * p[:, :-1] + 0.7 * q, p[:, :-1])
    p /= p.sum(-1, keepdims=True)
    race = np.log(q) + generator.gumbel(size=q.shape)
    got, wanted = compared(
        row_keys(0, rows),
        jnp.asarray(race.argmax(-1), jnp.int32),
        jnp.asarray(generator.integers(0, gamma + 1, rows), jnp.int32),
        jnp.asarray(q, jnp.float32),
        jnp.asarray(p, jnp.float32),
    )
    assert set(np.unique(got.num_accepted)) == set(range(gamma + 1))
    np.testing.assert_array_equal(got.num_accepted, wanted.num_accepted)
    np.testing.assert_array_equal(got.next_token, wanted.next_token)


@both_rules
def test_next_token_by_hand(rule):
    """p = (.5, .3, .2), q = (.2, .5, .3): the residual is all on id 0."""
    p, q, bonus = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]
    for seed in range(5):  # .99 > .3 / .5
        assert judge(rule, [1], [q], [p, bonus], seed, uniform=0.99) == (0, 0)
    assert judge(rule, [1], [q], [p, bonus], uniform=0.59) == (1, 2)
    assert judge(rule, [1], [q], [p, bonus], uniform=0.61) == (0, 0)


@both_rules
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_equal_laws_accept_everything(rule, uniform):
    q, _ = random_laws(0, 3, 4)
    p = [*q, [0, 0, 0, 1]]
    assert judge(rule, [0, 1, 2], q, p, uniform=uniform) == (3, 3)


@both_rules
def test_a_forced_rejection_of_equal_laws_draws_from_p(rule):
    """The residual is empty: no NaN, and p itself is drawn from."""
    q = [[0.1, 0.6, 0.3, 0.0]] * 2
    p = [*q, q[0]]
    drawn = [judge(rule, [1, 1], q, p, seed, uniform=1.0) for seed in range(40)]
    assert {accepted for accepted, _ in drawn} == {0}
    assert {token for _, token in drawn} == {0, 1, 2}


@both_rules
def test_nearly_equal_laws_stay_finite(rule):
    """Laws that agree in bfloat16 and differ in float32."""
    q, _ = random_laws(1, 3, 4)
    p = np.concatenate([q * (1 + 1e-4 * np.array([1, -1, 1, -1])), q[:1]])
    p /= p.sum(-1, keepdims=True)
    accepted, token = simulate(rule, q, p)
    assert accepted.mean() > 2.99 and set(np.unique(token)) <= {0, 1, 2, 3}


@both_rules
def test_zero_probability_never_passes(rule):
    """Even at u = 0, where an epsilon or a <= lets it through."""
    q, p = [[0.5, 0.5, 0.0]] * 2, [[0.0, 0.4, 0.6], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    for seed in range(5):
        accepted, token = judge(rule, [0, 1], q, p, seed, uniform=0.0)
        assert accepted == 0 and token in (1, 2)
        assert judge(rule, [1, 1], q, p, seed, uniform=0.0) == (1, 0)
    block, scored = padded([0, 1], q, p)

    def zeros(key, shape=(), *arguments, **settings):
        return jnp.zeros(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "uniform", zeros)
        noise = Noise(keys=jax.random.key(0), start=jnp.int32(0))
        assert epsilon_ratio(noise, block, scored, None).num_accepted > 0


@both_rules
def test_point_mass_targets(rule):
    """p is 0 but at one id: accepted there, and the next token is certain."""
    point, q = np.eye(4)[[2, 1, 3]], np.full((2, 4), 0.25)
    for seed in range(5):
        assert judge(rule, [2, 1], q, point, seed) == (2, 3)
        assert judge(rule, [2, 0], q, point, seed) == (1, 1)
        assert judge(rule, [0, 1], q, point, seed) == (0, 2)


@both_rules
def test_disjoint_supports(rule):
    q, p = [[0.5, 0.5, 0, 0]] * 3, [[0, 0, 0.3, 0.7]] * 4
    accepted, token = simulate(rule, q, p)
    assert (accepted == 0).all()
    assert chi_square_p(token[:, None], np.array(p[0])) > 1e-3


@both_rules
def test_one_hot_drafts_are_accepted_with_their_target_probability(rule):
    """Also in the sparse form, which must give the very same verdicts."""
    p = jnp.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    tokens = jnp.array([1], jnp.int32)
    sparse = Law(probs=jnp.ones((1, 1)), ids=tokens[:, None])

    @jax.jit
    @jax.vmap
    def run(key):
        noise = Noise(keys=key, start=jnp.int32(0))
        block = DraftBlock(tokens=tokens, length=jnp.int32(1), law=sparse)
        dense = block.replace(law=Law(probs=sparse.dense(3)))
        scored = scored_of(p)
        return rule(noise, block, scored, None), rule(noise, dense, scored, None)

    verdict, same = run(row_keys(0, 50_000))
    np.testing.assert_array_equal(verdict.num_accepted, same.num_accepted)
    np.testing.assert_array_equal(verdict.next_token, same.next_token)
    assert abs(float(verdict.num_accepted.mean()) - 0.6) < 0.01
    rejected = np.asarray(verdict.next_token)[np.asarray(verdict.num_accepted) == 0]
    assert chi_square_p(rejected[:, None], np.array([0.25, 0, 0.75])) > 1e-3


@both_rules
def test_empty_blocks_draw_from_p(rule):
    q, p = random_laws(2, 2, 4)
    accepted, token = simulate(rule, q, p, length=0)
    assert (accepted == 0).all()
    assert chi_square_p(token[:, None], p[0]) > 1e-3


@both_rules
def test_what_lies_past_the_block_plays_no_part(rule):
    """Other tokens and laws there, impossible ones too: the same verdict."""
    q, p = random_laws(3, 3, 4)
    for seed in range(20):
        for length in (0, 1, 2):
            plain = judge(rule, [0, 1, 2], q, p, seed, length)
            cut = judge(rule, [0, 1][:length], q[:length], p[: length + 1], seed)
            assert cut == plain and plain[0] <= length


@both_rules
def test_the_same_inputs_give_the_same_verdict(rule):
    q, p = random_laws(4, 3, 4)
    assert judge(rule, [0, 1, 2], q, p) == judge(rule, [0, 1, 2], q, p)


def test_every_test_has_its_own_uniform():
    noises = Noise(keys=row_keys(0, 20), start=jnp.zeros(20, jnp.int32))
    uniforms = jax.vmap(lambda noise: chain.uniforms(noise, 8))(noises)
    assert len(np.unique(uniforms)) == 160
    assert 0 <= uniforms.min() and uniforms.max() < 1


@pytest.mark.parametrize(
    ("tokens", "length", "expected"),
    [
        ([4, 5, 6], 3, (3, 7)),
        ([4, 5, 6], 2, (2, 6)),
        ([4, 9, 6], 3, (1, 5)),
        ([9, 5, 6], 3, (0, 4)),
        ([4, 5, 6], 0, (0, 4)),
    ],
)
def test_greedy_rule(tokens, length, expected):
    block = DraftBlock(tokens=jnp.array(tokens, jnp.int32), length=jnp.int32(length))
    verdict = greedy_rule(jnp.array([4, 5, 6, 7], jnp.int32), block, 3)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == expected


def test_needs():
    for verifier in (token_verify, block_verify):
        assert verifier.needs_law and verifier.lossless and verifier.noise == "step"
