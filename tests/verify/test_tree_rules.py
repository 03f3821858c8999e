"""Every rule of trees writes the target's joint law; its wrong twins do not."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, table_model
from specjax.sampling import draw, residual
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, Verifier, kseq, paths, recursive, traversal
from specjax.verify.base import normalised
from tests.helpers import (
    quick_compile,  # noqa: F401
)
from tests.verify import rule_laws

SLOW = pytest.mark.slow
ROWS = 200_000
VOCAB = 4
TARGETS = [table_model(seed, VOCAB, 2, zeros=0.15) for seed in (0, 1)]
DRAFTS = [
    table_model(seed + 7, VOCAB, 2, zeros=0.1, like=target, mix=0.2)
    for seed, target in enumerate(TARGETS)
]
# Node 0 has two children, of which the first has two and the second one.
TREE = (-1, 0, 0, 1, 1, 2)
PATHS = (-1, 0, 0, 0, 1, 2, 3)
CHAIN = (-1, 0, 1)

RULES = {
    "exact_match": (verify.exact_match_verify, TREE, "independent"),
    "exact_match, chosen": (verify.exact_match_verify, TREE, "chosen"),
    "coupled": (verify.coupled_verify, TREE, "distinct"),
    "recursive": (verify.recursive_verify, TREE, "independent"),
    "recursive, distinct": (verify.recursive_distinct_verify, TREE, "distinct"),
    "k-seq": (verify.kseq_verify, TREE, "independent"),
    "best path": (verify.best_path_verify, PATHS, "independent"),
    "traversal": (verify.traversal_verify, TREE, "distinct"),
}


@pytest.mark.parametrize("pair", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("name", RULES)
def test_the_law_is_the_targets(name, pair):
    verifier, tree, how = RULES[name]
    texts, accepted = rule_laws.sample(
        verifier, TARGETS[pair], DRAFTS[pair], tree, how, ROWS
    )
    assert chi_square_p(texts, rule_laws.exact(TARGETS[pair])) > 1e-3
    depth = rule_laws.depth_of(tree)
    counts = np.bincount(accepted, minlength=depth + 1)
    assert len(counts) == depth + 1 and (counts > ROWS / 200).all()


def without_residual(noise, block, scored, params):
    """Tries every child against the target's whole law."""
    del params
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recursive, "residual", lambda left, law: left)
        return verify.independent_rule(noise, block, scored, None)


def mass_alone(noise, block, scored, params):
    """Traversal in which a node passes with the residual's mass itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traversal, "after_rejection", lambda mass, passing: mass)
        return verify.traversal_rule(noise, block, scored, params)


def best_as_if_drawn(noise, block, scored, params):
    """The best of several paths, judged as if it were the only one."""
    honest = paths.best_of

    def lying(p, q, count):
        return honest(p, q, count)[0], q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "best_of", lying)
        return verify.best_path_rule(noise, block, scored, params)


def unrelaxed(noise, block, scored, params):
    """K-SEQ at half of its rho, where it accepts more than there is."""
    honest = kseq.relaxation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kseq, "relaxation", lambda *own: 0.6 * honest(*own))
        return verify.kseq_rule(noise, block, scored, params)


def accept_then_residual(noise, block, scored, params):
    """Keeps a child that equals a draw, and follows a mismatch with the residual."""
    del params
    plain = verify.match_rule(noise, block, scored, None)
    at = jnp.where(plain.num_accepted > 0, plain.path[plain.num_accepted - 1], 0)
    vocab_size = scored.logits.shape[-1]
    p = scored.law.row(at, vocab_size)
    q = block.law.row(at, vocab_size)
    leaf = ~jnp.any(block.parents == at)
    weights = jnp.where(leaf, p, residual(p, q))
    token = draw(noise.key(0, 99), weights)
    return plain.replace(next_token=token)


WRONG = {
    "without residual": (Verifier(without_residual), TREE, "independent"),
    "mass alone": (Verifier(mass_alone), TREE, "distinct"),
    "best as if drawn": (Verifier(best_as_if_drawn), PATHS, "independent"),
    "unrelaxed": (Verifier(unrelaxed), TREE, "independent"),
    "accept then residual": (Verifier(accept_then_residual), TREE, "independent"),
    # Right rules, on children that were drawn in another way than they are for.
    "independent as distinct": (verify.recursive_distinct_verify, TREE, "independent"),
    "distinct as independent": (verify.recursive_verify, TREE, "distinct"),
    "chosen as drawn": (verify.recursive_distinct_verify, TREE, "chosen"),
    "k-seq of distinct": (verify.kseq_verify, TREE, "distinct"),
    "traversal of independent": (verify.traversal_verify, TREE, "independent"),
    "traversal of chosen": (verify.traversal_verify, TREE, "chosen"),
}


QUICK = ("without residual", "independent as distinct", "accept then residual")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name not in QUICK)) for name in WRONG]
)
def test_wrong_twins_are_caught(name):
    verifier, tree, how = WRONG[name]
    found = []
    for target, draft in zip(TARGETS, DRAFTS, strict=True):
        texts, _ = rule_laws.sample(verifier, target, draft, tree, how, ROWS)
        found.append(chi_square_p(texts, rule_laws.exact(target)))
    assert min(found) < 1e-6


P, Q = [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]


def at_one_position(verifier, how, count) -> float:
    laws = [as_table(np.tile(law, (13, 1)), 2) for law in (P, Q)]
    tree = (-1, *[0] * count)
    return float(rule_laws.sample(verifier, *laws, tree, how, ROWS)[1].mean())


@pytest.mark.parametrize(
    ("verifier", "how", "count", "expected"),
    [
        (verify.recursive_verify, "independent", 2, 0.80),
        (verify.recursive_distinct_verify, "distinct", 2, 0.94),
        (verify.kseq_verify, "independent", 2, 0.815),
        pytest.param(verify.recursive_verify, "independent", 3, 0.88, marks=SLOW),
        pytest.param(verify.recursive_distinct_verify, "distinct", 3, 1.0, marks=SLOW),
        pytest.param(verify.traversal_verify, "distinct", 2, 0.94, marks=SLOW),
        pytest.param(verify.best_path_verify, "independent", 2, 0.85, marks=SLOW),
        pytest.param(verify.exact_match_verify, "independent", 1, 0.29, marks=SLOW),
    ],
)
def test_acceptance_at_one_position(verifier, how, count, expected):
    spread = (max(expected * (1 - expected), 1e-9) / ROWS) ** 0.5
    limit = 4 * spread + 5e-4  # the last digit of what is expected
    assert abs(at_one_position(verifier, how, count) - expected) < limit


def chain_blocks(rows: int, gamma: int = 3, vocab_size: int = 5):
    generator = np.random.default_rng(0)
    q = generator.dirichlet(np.ones(vocab_size), (rows, gamma))
    p = generator.dirichlet(np.ones(vocab_size), (rows, gamma + 1))
    below = q.cumsum(-1) < generator.random((rows, gamma, 1))
    block = DraftBlock(
        tokens=jnp.asarray(below.sum(-1), jnp.int32),
        length=jnp.asarray(generator.integers(0, gamma + 1, rows), jnp.int32),
        law=Law(probs=jnp.asarray(q, jnp.float32)),
    )
    p = jnp.asarray(p, jnp.float32)
    return block, Scored(law=Law(probs=p), logits=jnp.log(p))


SAME = [
    (verify.independent_rule, verify.token_rule),
    (verify.distinct_rule, verify.token_rule),
    (verify.kseq_rule, verify.token_rule),
    (verify.traversal_rule, verify.block_rule),
    (verify.best_path_rule, verify.block_rule),
]


@pytest.mark.parametrize(("rule", "chain_rule"), SAME)
def test_a_chain_is_judged_as_by_the_rule_of_chains(rule, chain_rule):
    """Row by row, from the same noise, at every length of the block."""
    block, scored = chain_blocks(2000)
    keys = jax.random.split(jax.random.key(0), 2000)

    @functools.partial(jax.jit, static_argnums=0)
    def judge(rule, keys):
        return jax.vmap(
            lambda key, own, seen: rule(
                Noise(keys=key, start=jnp.int32(0)), own, seen, None
            )
        )(keys, block, scored)

    one, other = judge(rule, keys), judge(chain_rule, keys)
    assert one.path is None
    np.testing.assert_array_equal(one.num_accepted, other.num_accepted)
    assert np.mean(np.asarray(one.next_token) != np.asarray(other.next_token)) < 2e-3
    assert len(np.unique(one.num_accepted)) == 4


def test_absent_tokens_are_skipped():
    """Three children of a law with two tokens: the third was not drawn."""
    law = as_table(np.tile([0.5, 0.5, 0.0], (13, 1)), 2)
    target = as_table(np.tile([0.2, 0.1, 0.7], (13, 1)), 2)
    for verifier in (verify.recursive_distinct_verify, verify.traversal_verify):
        texts, accepted = rule_laws.sample(
            verifier, target, law, (-1, 0, 0, 0), "distinct", ROWS
        )
        assert chi_square_p(texts, rule_laws.exact(target)) > 1e-3
        # What the two tokens have of the target's law, and no more.
        assert accepted.mean() == pytest.approx(0.3, abs=0.005)


def test_the_best_of_several_has_the_law_that_it_says():
    """Against every draw of three, ranked by hand."""
    p = np.array([0.1, 0.4, 0.2, 0.3])
    q = np.array([0.4, 0.3, 0.3, 0.0])
    ratio, law = paths.best_of(jnp.float32(p), jnp.float32(q), jnp.float32(3))
    order = list(np.argsort(-np.asarray(ratio), kind="stable"))
    ranks = [order.index(token) for token in range(4)]
    assert ranks[1] < ranks[2] < ranks[0] < ranks[3]
    expected = np.zeros(4)
    for draws in itertools.product(range(3), repeat=3):
        best = min(draws, key=lambda token: ranks[token])
        expected[best] += np.prod(q[list(draws)])
    np.testing.assert_allclose(law, expected, atol=1e-6)
    assert not np.asarray(
        paths.best_of(jnp.float32(p), jnp.float32(q), jnp.float32(0))[1]
    ).any()


def test_relaxation_leaves_nothing_negative():
    generator = np.random.default_rng(0)
    for count in (1, 2, 3, 5):
        for _ in range(20):
            p, q = jnp.asarray(generator.dirichlet(np.ones(6), 2), jnp.float32)
            count = jnp.float32(count)
            rho = kseq.relaxation(p, q, count)
            assert 1 <= rho <= count
            each = np.minimum(q, p / rho)
            tries = (1 - (1 - each.sum()) ** count) / each.sum()
            assert (np.asarray(p) - each * tries > -1e-5).all()
            # The least: a smaller one leaves something negative.
            if rho > 1.01:
                less = np.minimum(q, p / (rho * 0.97))
                tries = (1 - (1 - less.sum()) ** count) / less.sum()
                assert (np.asarray(p) - less * tries).min() < 1e-6
    assert (normalised(jnp.zeros(3)) == 0).all()


def test_the_law_of_the_best_keeps_its_digits():
    """Good tokens that the draft hardly knows, in a large vocabulary."""
    generator = np.random.default_rng(0)
    p, q = (
        np.exp(3 * generator.normal(size=32128)).astype(np.float64) for _ in range(2)
    )
    p, q = p / p.sum(), q / q.sum()
    ratio, law = paths.best_of(jnp.float32(p), jnp.float32(q), jnp.float32(3))
    order = np.argsort(-np.asarray(ratio), kind="stable")
    below = np.cumsum(np.asarray(jnp.float32(q), np.float64)[order][::-1])[::-1]
    below /= below[0]
    after = np.append(below[1:], 0.0)
    exact = np.empty(32128)
    exact[order] = (below - after) * (below**2 + below * after + after**2)
    law = np.asarray(law)
    assert (law[np.float32(q) > 0] > 0).all()
    np.testing.assert_allclose(law, exact, rtol=1e-4)
