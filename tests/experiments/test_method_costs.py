"""What costs between the measured draft lengths are taken to be."""

from __future__ import annotations

import pytest

from experiments import method_costs


@pytest.mark.parametrize(
    "gamma, seconds",
    [(1, 0.75), (2, 1.0), (3, 1.25), (4, 1.5), (5, 2.5), (6, 3.5)],
)
def test_costs_lie_on_the_lines_between_measured_ones(gamma, seconds):
    target = {"step": 0.5, "gammas": [1, 6], "verify": [1.0, 2.0]}
    draft = {"gammas": [2, 4, 6], "seconds": [1.0, 1.5, 3.5]}
    rows = method_costs.predict([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], target, draft)
    row = rows[gamma - 1]
    assert row["gamma"] == gamma
    assert row["c"] == pytest.approx(seconds / gamma / 0.5)
    assert row["v"] == pytest.approx(1 + (gamma - 1) / 5)


def test_what_is_extrapolated_stays_above_half_the_first():
    target = {"step": 1.0, "gammas": [1, 4], "verify": [1.0, 1.0]}
    draft = {"gammas": [2, 4], "seconds": [1.0, 4.0]}
    rows = method_costs.predict([0.5] * 4, target, draft)
    assert rows[0]["c"] == 0.5
