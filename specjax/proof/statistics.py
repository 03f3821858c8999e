"""Tests of samples, made for thousands of them at once: none is sharper than it says.

Cells that expect little are pooled, and cells that expect nothing must be empty.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from scipy import stats

_FEWEST = 5.0  # that a cell may expect
_NOTHING = 1e-12  # a probability up to here is 0


def chi_square_p(samples: Any, law: Any) -> float:
    """p-value of samples under an exact joint law.

    Args:
        samples: ``[rows, length]`` ids.
        law: ``[V] * length`` probabilities.

    Returns:
        0 where a sample has probability 0.
    """
    samples, law = np.asarray(samples), np.asarray(law, np.float64)
    cells = np.ravel_multi_index(tuple(samples.T), law.shape)
    counts, law = np.bincount(cells, minlength=law.size), law.ravel()
    if counts[law <= _NOTHING].any():
        return 0.0
    counts, law = counts[law > _NOTHING], law[law > _NOTHING]
    expected = law / law.sum() * len(samples)
    counts, expected = _pooled(counts[None], expected)
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(counts[0], expected).pvalue)


def two_sample_p(one: Sequence[Hashable], other: Sequence[Hashable]) -> float | None:
    """p-value of two samples of outcomes that come from one law, if they do.

    Args:
        one: outcomes of any kind.
        other: as many or not.

    Returns:
        None where nothing can be told: all outcomes but one are too rare.
    """
    counts = [collections.Counter(sample) for sample in (one, other)]
    outcomes = sorted(counts[0] | counts[1], key=repr)
    table = np.array([[own[outcome] for outcome in outcomes] for own in counts])
    smaller = min(len(one), len(other)) / (len(one) + len(other))
    table, _ = _pooled(table, table.sum(0) * smaller)
    if table.shape[1] == 1:
        return None
    return float(stats.chi2_contingency(table, correction=False).pvalue)


def _pooled(
    counts: Int64[np.ndarray, "S K"], expected: Float64[np.ndarray, " K"]
) -> tuple[Int64[np.ndarray, "S C"], Float64[np.ndarray, " C"]]:
    """The smallest cells made one, until none expects fewer than `_FEWEST`."""
    order = np.argsort(expected, kind="stable")
    counts, expected = counts[:, order], expected[order]
    small = int(np.sum(expected < _FEWEST))
    while 0 < small < len(expected) and expected[:small].sum() < _FEWEST:
        small += 1
    if small < 2:
        return counts, expected
    return (
        np.concatenate([counts[:, :small].sum(1, keepdims=True), counts[:, small:]], 1),
        np.append(expected[:small].sum(), expected[small:]),
    )


class Mean(NamedTuple):
    """How far a mean is from what it should be.

    Attributes:
        z: in standard errors.
        p: p-value.
    """

    z: float
    p: float


def mean_of_counts(counts: Any, law: Any) -> Mean:
    """Whether the mean of counts is that of their law.

    Args:
        counts: whole numbers, ``[rows]``.
        law: probability of each count from 0 on.

    Source: the p-value is Bernstein's inequality, which holds at any number of rows and
    any skew: a rare rejection is no surprise.
    """
    counts, law = np.asarray(counts), np.asarray(law, np.float64)
    values, rows = np.arange(len(law)), len(counts)
    mean = float(law @ values)
    variance = max(float(law @ (values - mean) ** 2), 0.0)
    apart = abs(float(counts.mean()) - mean)
    if apart < 1e-6:  # float32
        return Mean(z=0.0, p=1.0)
    spread = math.sqrt(variance / rows)
    bound = variance + max(len(law) - 1, 1) * apart / 3
    return Mean(
        z=apart / spread if spread > 0 else math.inf,
        p=min(1.0, 2 * math.exp(-rows * apart**2 / (2 * bound))),
    )


def holm(p_values: Any) -> Float64[np.ndarray, " N"]:
    """p-values corrected for their number, in their own order (Holm 1979).

    The chance that any of them falls below a bar, where nothing is wrong, is at most
    that bar.
    """
    given = np.asarray(p_values, np.float64)
    order = np.argsort(given, kind="stable")
    grown = given[order] * (len(given) - np.arange(len(given)))
    corrected = np.empty_like(given)
    corrected[order] = np.minimum(np.maximum.accumulate(grown), 1.0)
    return corrected
