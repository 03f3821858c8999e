"""Each statistic accepts what is fair, and rejects what is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specjax.proof import statistics

LAW = np.array([[0.5, 0.25], [0.25, 0.0]])
FAIR = np.array([[0, 0]] * 200 + [[0, 1]] * 100 + [[1, 0]] * 100)


def test_chi_square_on_hand_values():
    """Exact counts pass; what cannot be, or is lopsided, does not."""
    assert statistics.chi_square_p(FAIR, LAW) > 0.999
    assert statistics.chi_square_p(np.concatenate([FAIR, [[1, 1]]]), LAW) == 0
    assert statistics.chi_square_p(FAIR[:300], LAW) < 1e-6
    assert statistics.chi_square_p(FAIR * 0, np.array([[1.0, 0], [0, 0]])) == 1


def test_one_rare_sample_is_no_surprise():
    """Cells are pooled until none expects little: a lone cell is not let stand."""
    law = np.array([0.9999, 1e-4 - 1e-6, 1e-6])
    samples = np.array([0] * 999 + [2])[:, None]
    assert statistics.chi_square_p(samples, law) == 1  # nothing left to compare
    law = np.array([0.6, 0.4 - 1e-6, 1e-6])
    samples = np.array([0] * 600 + [1] * 399 + [2])[:, None]
    assert statistics.chi_square_p(samples, law) > 0.9
    samples = np.array([0] * 560 + [1] * 340 + [2] * 100)[:, None]
    assert statistics.chi_square_p(samples, law) < 1e-2


def test_p_values_of_fair_samples_are_uniform():
    generator = np.random.default_rng(0)
    law = generator.dirichlet(0.5 * np.ones(30))
    fair = [
        statistics.chi_square_p(generator.choice(30, (2000, 1), p=law), law)
        for _ in range(400)
    ]
    two = [
        statistics.two_sample_p(
            generator.choice(30, 500, p=law).tolist(),
            generator.choice(30, 300, p=law).tolist(),
        )
        for _ in range(400)
    ]
    for p_values in (fair, two):
        for bar in (0.05, 0.2, 0.5, 0.8):
            spread = 4 * math.sqrt(bar * (1 - bar) / 400)
            assert abs(np.mean(np.array(p_values) < bar) - bar) < spread + 0.01


def test_two_samples_of_any_outcomes():
    one = [(1, 2)] * 60 + [(1,)] * 40 + [(9, 9)] * 3
    assert statistics.two_sample_p(one, one[::-1]) > 0.99
    assert statistics.two_sample_p(one, [(1, 2)] * 20 + [(1,)] * 80) < 1e-6
    # The same outcome everywhere, and outcomes too rare to tell anything.
    assert statistics.two_sample_p([()] * 9, [()] * 5) is None
    assert statistics.two_sample_p(["a", "b"], ["c", "d"]) is None
    assert statistics.two_sample_p([0] * 50, [1] * 50) < 1e-6


def test_mean_of_counts():
    law = [0.25, 0.5, 0.25]
    exact = [0] * 250 + [1] * 500 + [2] * 250
    assert statistics.mean_of_counts(exact, law) == (0.0, 1.0)
    z, p = statistics.mean_of_counts([1] * 900 + [2] * 100, law)
    assert z == pytest.approx(0.1 / math.sqrt(0.5 / 1000)) and 1e-5 < p < 1e-3
    assert statistics.mean_of_counts([2] * 1000, law).p < 1e-100
    # A certain number: any other is impossible.
    z, p = statistics.mean_of_counts([2] * 999 + [0], [0.0, 0.0, 1.0])
    assert z == math.inf and p < 0.5
    assert statistics.mean_of_counts([1] * 1000, [0.0, 0.0, 1.0]).p < 1e-100
    # Two of a kind that comes once in 10,000: 19 standard errors and no proof.
    rare = [1e-4, 0.9999]
    assert statistics.mean_of_counts([1] * 998 + [0] * 2, rare).p > 1e-3


def test_holm_by_hand():
    corrected = statistics.holm([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_array_equal(statistics.holm([0.9, 0.8]), [1, 1])
    assert len(statistics.holm([])) == 0
