import ast
import doctest
import math
import pathlib

import numpy as np
import pytest

from specjax import theory

# alpha, gamma, operations, speed (Leviathan et al. 2023, Table 1; c = c_hat = 0).
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

# gamma, alpha, c as printed (Tables 2 and 4); then, worked out apart from this code:
# the formula's speedup, its ceiling at c = 0 and its best gamma.
TABLE_2 = [
    (7, 0.75, 0.02, 3.157, 3.60, 9),
    (7, 0.80, 0.04, 3.251, 4.16, 9),
    (7, 0.82, 0.11, 2.497, 4.42, 6),
    (7, 0.62, 0.02, 2.258, 2.57, 6),
    (5, 0.68, 0.04, 2.347, 2.82, 6),
    (3, 0.71, 0.11, 1.934, 2.57, 4),
    (5, 0.65, 0.02, 2.402, 2.64, 7),
    (5, 0.73, 0.04, 2.619, 3.14, 7),
    (3, 0.74, 0.11, 2.025, 2.69, 4),
    (5, 0.53, 0.02, 1.891, 2.08, 5),
    (3, 0.55, 0.04, 1.803, 2.02, 4),
    (3, 0.56, 0.11, 1.541, 2.05, 3),
]


def test_doctests():
    failed, tried = doctest.testmod(theory)
    assert failed == 0
    assert tried >= 16


def test_imports_nothing_of_ours():
    tree = ast.parse(pathlib.Path(theory.__file__).read_text())
    names = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("specjax", "jax", "flax"))]


@pytest.mark.parametrize("alpha, gamma, operations, speed", TABLE_1)
def test_table_1(alpha, gamma, operations, speed):
    assert f"{theory.operation_factor(alpha, gamma, 0.0):.2f}" == f"{operations:.2f}"
    assert f"{theory.walltime_factor(alpha, gamma, 0.0):.2f}" == f"{speed:.2f}"


@pytest.mark.parametrize("gamma, alpha, c, speed, ceiling, best", TABLE_2)
def test_table_2(gamma, alpha, c, speed, ceiling, best):
    assert theory.walltime_factor(alpha, gamma, c) == pytest.approx(speed, abs=5.1e-4)
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(ceiling, abs=5.1e-3)
    assert theory.best_gamma(alpha, c) == best


# Lenience 1, 0.5, 0.3, 0.1 of T5-small at c = 0.015: alpha and speed as printed
# (A.5, Table 5), then the most that the formula gives, worked out apart from this.
TABLE_5 = [
    (0.62, 2.5, 2.33),
    (0.71, 3.1, 2.94),
    (0.76, 3.6, 3.45),
    (0.84, 5.0, 4.79),
]


@pytest.mark.parametrize("alpha, printed, most", TABLE_5)
def test_printed_speeds_of_lenience_exceed_the_formula(alpha, printed, most):
    best = theory.walltime_factor(alpha, theory.best_gamma(alpha, 0.015), 0.015)
    assert f"{best:.2f}" == f"{most:.2f}"
    assert best < printed


def test_expected_tokens_is_the_sum_of_survivals():
    for alpha in (0.0, 0.3, 0.97, 1 - 1e-9, 1.0):
        for gamma in (0, 1, 7):
            summed = 1 + theory.iid_survival(alpha, gamma).sum()
            assert theory.expected_tokens(alpha, gamma) == pytest.approx(
                summed, rel=1e-14
            )


def test_expected_tokens_at_the_edges():
    assert theory.expected_tokens(1.0, 5) == 6.0
    assert theory.expected_tokens(0.0, 5) == 1.0
    assert theory.expected_tokens(0.8, math.inf) == pytest.approx(5.0)
    assert theory.expected_tokens(1.0, math.inf) == math.inf
    assert theory.walltime_factor(0.8, math.inf, 0.0) == pytest.approx(5.0)
    assert theory.walltime_factor(0.8, math.inf, 0.1) == 0.0


def test_numbers_give_floats_and_arrays_broadcast():
    assert type(theory.expected_tokens(0.5, 3)) is float
    assert type(theory.best_gamma(0.5, 0.1)) is int
    alpha, gamma = np.array([0.6, 0.8])[:, None], np.array([2, 5, 7])
    table = theory.walltime_factor(alpha, gamma, 0.05)
    assert table.shape == (2, 3)
    assert table[1, 2] == theory.walltime_factor(0.8, 7, 0.05)
    best = theory.best_gamma(np.array([0.75, 0.3]), np.array([0.02, 0.3]))
    assert best.tolist() == [9, 0]


def test_drafting_helps_if_and_only_if_alpha_exceeds_c():
    for alpha in np.linspace(0.05, 0.95, 19):
        for c in np.linspace(0.05, 0.95, 19):
            helps = theory.drafting_helps(alpha, c)
            assert helps == (theory.best_gamma(alpha, c) > 0)
            least = theory.least_gain(alpha, c)
            assert least == pytest.approx(theory.walltime_factor(alpha, 1, c))
            assert helps == (least > 1)
            best = theory.walltime_factor(alpha, theory.best_gamma(alpha, c), c)
            assert best >= least - 1e-12
    grid = theory.drafting_helps(np.array([0.2, 0.3]), 0.2)
    assert grid.tolist() == [False, True]
    assert theory.least_gain(np.array([0.0, 1.0]), 0.0).tolist() == [1.0, 2.0]


def test_best_gamma_obeys_the_marginal_condition():
    """One more draft pays while alpha^(g+1) (1 + c g) > c sum of alpha^i, i <= g."""
    for alpha in (0.4, 0.7, 0.9, 0.97):
        for c in (0.005, 0.05, 0.2):
            gamma = 0
            while alpha ** (gamma + 1) * (1 + c * gamma) > c * sum(
                alpha**i for i in range(gamma + 1)
            ):
                gamma += 1
            assert theory.best_gamma(alpha, c, max_gamma=500) == gamma


def test_one_more_pays_where_the_longer_draft_is_faster():
    """Of any survival and costs; a test that forgets what v costs errs."""
    generator = np.random.default_rng(0)
    forgetful = 0
    for _ in range(300):
        gamma = int(generator.integers(0, 8))
        survival = np.sort(generator.uniform(size=gamma + 1))[::-1]
        c = generator.uniform(0, 0.5)
        v, longer = 1.0, 1.0
        if gamma:
            v, longer = np.sort(generator.uniform(1, 2, size=2))
        else:
            longer = generator.uniform(1, 2)
        with_it = theory.speedup_from_survival(survival, c, longer)
        without = theory.speedup_from_survival(survival[:-1], c, v)
        pays = theory.one_more_pays(survival, c, v, longer)
        assert pays == (with_it > without)
        forgetful += theory.one_more_pays(survival, c, v) != pays
    assert forgetful > 30


def test_one_more_pays_up_to_the_best_gamma():
    survival = theory.iid_survival(0.75, 20)
    pays = [theory.one_more_pays(survival[: g + 1], 0.02) for g in range(20)]
    assert pays == [g < theory.best_gamma(0.75, 0.02) for g in range(20)]
    # A tie is no gain.
    assert not theory.one_more_pays([0.3], 0.3)


def test_expected_calls_by_hand_and_in_the_long_run():
    # Rounds of 1 or 2 tokens with equal probability.
    half = [0.5]
    calls = [theory.expected_calls(half, tokens) for tokens in range(4)]
    assert calls == [0.0, 1.0, 1.5, 2.25]
    assert theory.expected_calls([], 7) == 7
    assert theory.expected_calls([1.0] * 7, 20) == 3
    survival = theory.iid_survival(0.75, 7)
    whole = 1 + survival.sum()
    # Each call more or less at the end is worth less and less.
    lost = [1 - n / whole / theory.expected_calls(survival, n) for n in (20, 40, 2000)]
    assert f"{lost[0]:.1%}" == "9.6%"
    assert lost[0] > lost[1] > lost[2] > 0
    assert lost[2] < 0.002


def test_expected_calls_against_draws():
    survival = np.array([0.9, 0.5, 0.2])
    generator = np.random.default_rng(1)
    rows = 20_000
    left, calls = np.full(rows, 10), np.zeros(rows)
    while np.any(left > 0):
        calls += left > 0
        left -= 1 + (generator.uniform(size=(rows, 1)) < survival).sum(-1)
    error = 4 * calls.std() / rows**0.5
    assert theory.expected_calls(survival, 10) == pytest.approx(calls.mean(), abs=error)


def test_best_gamma_stops_at_the_cap():
    assert theory.best_gamma(0.9, 0.0, max_gamma=12) == 12
    assert theory.best_gamma(0.9, 0.0, max_gamma=0) == 0


def test_speedup_from_survival_contains_the_paper_formula():
    survival = theory.iid_survival(0.8, 7)
    assert theory.speedup_from_survival(survival, 0.04) == pytest.approx(
        theory.walltime_factor(0.8, 7, 0.04)
    )
    assert theory.speedup_from_survival([], 0.04) == 1.0


def test_bursty_acceptance_beats_the_formula_at_its_own_mean():
    """Half the calls accept all, half nothing: 1/2 stand at every depth."""
    bursty = theory.speedup_from_survival([0.5, 0.5, 0.5], 0.0)
    assert bursty == 2.5
    assert bursty > theory.walltime_factor(0.5, 3, 0.0)


def test_verification_cost_moves_the_best_gamma():
    survival = theory.iid_survival(0.8, 8)
    assert theory.best_gamma_from_survival(survival, 0.04) == 8
    assert theory.best_gamma_from_survival(survival, 0.9) == 0
    assert theory.best_gamma_from_survival([], 0.1) == 0
    # Four tokens for the price of one, then eight for that of two.
    tiles = [1.0] * 3 + [2.0] * 5
    assert theory.best_gamma_from_survival(survival, 0.04, tiles) == 3
    by_function = theory.best_gamma_from_survival(
        survival, 0.04, lambda gamma: tiles[gamma - 1]
    )
    assert by_function == 3
    # A drafter of one pass: the pass costs 0.3 however many tokens it proposes.
    one_pass = 0.3 / np.arange(1, 9)
    assert theory.best_gamma_from_survival(survival, one_pass) == 8
    assert theory.best_gamma_from_survival(survival, 0.3) == 3


def test_speedup_from_counts_agrees_with_survival_and_adds_the_encoders():
    survival = [0.9, 0.5, 0.2]
    calls = 100
    tokens = calls * (1 + sum(survival))
    loop = theory.speedup_from_survival(survival, 0.1, 1.3)
    assert theory.speedup_from_counts(tokens, calls, 3, 0.1, 1.3) == pytest.approx(loop)
    whole = theory.speedup_from_counts(tokens, calls, 3, 0.1, 1.3, 50.0, 20.0)
    assert whole == pytest.approx((50 + 260) / (50 + 20 + 160))
    assert 1 < whole < loop


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: theory.expected_tokens(1.2, 3), "alpha"),
        (lambda: theory.expected_tokens(math.nan, 3), "alpha"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma"),
        (lambda: theory.walltime_factor(0.5, 3, -0.1), "c is"),
        (lambda: theory.operation_factor(0.5, math.inf, 0.0), "gamma"),
        (lambda: theory.best_gamma(0.5, 0.1, max_gamma=-1), "max_gamma"),
        (lambda: theory.speedup_from_survival([0.5, 0.6], 0.1), "rise"),
        (lambda: theory.speedup_from_survival([1.5], 0.1), "survival"),
        (lambda: theory.speedup_from_survival(np.ones((1, 1)), 0.1), "shape"),
        (lambda: theory.speedup_from_survival([0.5], 0.1, 0.0), "verify_ratio"),
        (lambda: theory.best_gamma_from_survival([0.5], 0.1, [1, 2]), "verify_ratio"),
        (lambda: theory.speedup_from_counts(3, 0, 1, 0.1), "target_calls"),
        (lambda: theory.drafting_helps(1.1, 0.1), "alpha"),
        (lambda: theory.least_gain(0.5, -1), "c is"),
        (lambda: theory.one_more_pays([], 0.1), "survival is empty"),
        (lambda: theory.one_more_pays([0.5, 0.6], 0.1), "rise"),
        (lambda: theory.one_more_pays([0.5], 0.1, 1.0, 0.0), "longer_verify_ratio"),
        (lambda: theory.expected_calls([0.5], -1), "tokens"),
        (lambda: theory.expected_calls([1.5], 2), "survival"),
    ],
)
def test_numbers_out_of_range_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
