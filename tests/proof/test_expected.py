"""Expected accepted drafts: the papers' values by fractions, and what must agree."""

from __future__ import annotations

import fractions
import itertools

import numpy as np
import pytest

from specjax import verify
from specjax.proof.expected import accepted_law, laws_of, mean
from specjax.proof.grid import CHAIN, PATHS, TREE
from specjax.proof.tables import table_model

Fraction = fractions.Fraction
P = [Fraction(n, 10) for n in (1, 6, 3)]
Q = [Fraction(n, 10) for n in (5, 3, 2)]


def expected(verifier, tree, p=P, q=Q, **options):
    return mean(accepted_law(verifier, lambda _: p, lambda _: q, tree, **options))


def test_the_toy_of_block_verification():
    p, q = ([Fraction(n, 3) for n in own] for own in ((1, 2), (2, 1)))
    assert expected(verify.token_verify, CHAIN, p, q) == Fraction(10, 9)
    assert expected(verify.block_verify, CHAIN, p, q) == Fraction(11, 9)


@pytest.mark.parametrize(
    ("verifier", "siblings", "children", "value"),
    [
        (verify.recursive_verify, "independent", 2, Fraction(80, 100)),
        (verify.recursive_verify, "independent", 3, Fraction(88, 100)),
        (verify.recursive_distinct_verify, "distinct", 2, Fraction(94, 100)),
        (verify.recursive_distinct_verify, "distinct", 3, Fraction(1)),
        (verify.traversal_verify, "distinct", 2, Fraction(94, 100)),
        (verify.best_path_verify, "paths", 2, Fraction(85, 100)),
        (verify.token_verify, "independent", 1, Fraction(6, 10)),
        (verify.exact_match_verify, "independent", 1, Fraction(29, 100)),
        (verify.exact_match_verify, "chosen", 2, Fraction(7, 10)),
        (verify.coupled_verify, "distinct", 3, Fraction(1)),
    ],
)
def test_one_position(verifier, siblings, children, value):
    assert expected(verifier, (-1, *[0] * children), siblings=siblings) == value


def test_k_seq_at_one_position():
    value = expected(verify.kseq_verify, (-1, 0, 0), siblings="independent")
    assert float(value) == pytest.approx(0.815, abs=5e-4)


def test_one_coupled_draft():
    """Daliri et al.: the sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    value = sum(
        1 / sum(max(P[j] / P[i], Q[j] / Q[i]) for j in range(3)) for i in range(3)
    )
    assert expected(verify.coupled_verify, (-1, 0)) == value == Fraction(32, 55)


def test_coupled_drafts_by_many_races():
    p, q = np.array([0.1, 0.5, 0.3, 0.1]), np.array([0.5, 0.0, 0.3, 0.2])
    clocks = np.random.default_rng(0).exponential(size=(200_000, 4))
    with np.errstate(divide="ignore"):
        best, order = (clocks / p).argmin(1), (clocks / q).argsort(1)
    for children in (1, 2, 3):
        share = np.mean((order[:, :children] == best[:, None]).any(1))
        tree = (-1, *[0] * children)
        value = expected(verify.coupled_verify, tree, p.tolist(), q.tolist())
        assert value == pytest.approx(share, abs=5e-3)
    # All three that can be drawn, and then the one that cannot.
    assert expected(
        verify.coupled_verify, (-1, 0, 0, 0, 0), p.tolist(), q.tolist()
    ) == pytest.approx(1)


def tables(seed: int):
    target = table_model(seed, 4, 2, zeros=0.1)
    return laws_of(target), laws_of(table_model(seed + 5, 4, 2, zeros=0.1))


def test_block_beats_token_but_for_one_draft_and_one_hot_ones():
    for seed in range(3):
        p, q = tables(seed)
        token, block = (
            mean(accepted_law(rule, p, q, CHAIN))
            for rule in (verify.token_verify, verify.block_verify)
        )
        assert block > token + 1e-3

        def point(prefix, q=q):
            return [float(own == max(q(prefix))) for own in q(prefix)]

        for draft, tree in ((q, (-1, 0)), (point, CHAIN)):
            one, other = (
                accepted_law(rule, p, draft, tree)
                for rule in (verify.token_verify, verify.block_verify)
            )
            np.testing.assert_allclose(one, other)


PLAIN = {
    "recursive": (verify.recursive_verify, verify.token_verify),
    "distinct": (verify.recursive_distinct_verify, verify.token_verify),
    "k-seq": (verify.kseq_verify, verify.token_verify),
    "traversal": (verify.traversal_verify, verify.block_verify),
}


@pytest.mark.parametrize("name", PLAIN)
def test_on_a_chain_rules_of_trees_are_rules_of_chains(name):
    rule, plain = PLAIN[name]
    p, q = tables(3)
    np.testing.assert_allclose(
        accepted_law(rule, p, q, CHAIN), accepted_law(plain, p, q, CHAIN), atol=1e-9
    )


@pytest.mark.parametrize(
    "rule",
    [
        verify.exact_match_verify,
        verify.coupled_verify,
        verify.recursive_verify,
        verify.recursive_distinct_verify,
        verify.kseq_verify,
        verify.best_path_verify,
        verify.traversal_verify,
    ],
)
def test_laws_are_laws_and_more_nodes_do_not_hurt(rule):
    p, q = tables(1)
    drawn = rule.usual_siblings
    tree = PATHS if drawn == "paths" else TREE
    law = accepted_law(rule, p, q, tree, drawn)
    assert sum(law) == pytest.approx(1) and min(law) > 0
    assert mean(accepted_law(rule, p, q, tree[:-2], drawn)) < mean(law)


def test_blocks_that_end_at_their_own_tokens():
    """By hand: two drafts where the first is not 0, else one."""
    p, q = tables(0)
    first = np.minimum(p(()), q(()))
    second = [np.minimum(p((x,)), q((x,))).sum() for x in range(4)]
    by_hand = first.sum() + sum(first[x] * second[x] for x in (1, 2, 3))
    law = accepted_law(
        verify.token_verify, p, q, CHAIN, ends=lambda prefix: 0 in prefix
    )
    assert mean(law) == pytest.approx(by_hand)


def test_the_walk_through_a_tree_by_hand():
    """Exact match on independent children: every draw of two, and what it may equal."""
    p, q = tables(2)
    total = 0.0
    for one, two in itertools.product(range(4), repeat=2):
        for token in {one, two}:
            total += q(())[one] * q(())[two] * p(())[token]
    law = accepted_law(verify.exact_match_verify, p, q, (-1, 0, 0), "independent")
    assert mean(law) == pytest.approx(total)


def test_unknown_rules_are_not_enumerated():
    assert accepted_law(verify.typical(), lambda _: P, lambda _: Q, CHAIN) is None
