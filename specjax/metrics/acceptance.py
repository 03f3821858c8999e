"""Acceptance by depth and tokens per target call, from the counters of a decode."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.decoding import Stats
from specjax.errors import InputError


def merge(stats: Sequence[Stats]) -> Stats:
    """The counters of several batches as those of one.

    Args:
        stats: of decodes with the same gamma.

    Raises:
        InputError: no batch, or batches of different gamma.
    """
    gammas = {batch.drafted.shape[1] for batch in stats}
    if len(gammas) != 1:
        raise InputError(
            f"the batches have draft lengths {sorted(gammas)}: they must have one"
        )
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *stats)


def acceptance_rate(stats: Stats) -> float:
    """Accepted / drafted tokens, bonus tokens in neither; NaN if nothing was drafted.

    Drafted tokens after a rejection count as drafted, so this is less than alpha. Of a
    tree, whose path takes one token of each level, it is accepted / drafted levels.
    """
    return _ratio(_total(stats.accepted), _total(stats.drafted))


def survival(stats: Stats) -> list[float]:
    """Share of target calls in which the first i drafts all stood, i = 1 .. gamma.

    A depth that was not drafted, because the draft was shorter, counts as not survived,
    so that 1 + sum is the number of tokens per target call before the cut at EOS or
    budget. NaN without a target call.
    """
    calls = _total(stats.target_calls)
    return [_ratio(_total(depth), calls) for depth in np.asarray(stats.accepted).T]


def accepted_counts(stats: Stats) -> list[int]:
    """Target calls that accepted exactly 0, 1, .. gamma drafts, before the cut.

    Args:
        stats: of a decode.
    """
    reached = [_total(stats.target_calls), *map(_total, np.asarray(stats.accepted).T)]
    return [one - more for one, more in zip(reached, [*reached[1:], 0], strict=True)]


def draft_length(stats: Stats) -> float:
    """Drafted depth per target call: gamma, unless drafts end early."""
    return _ratio(_total(stats.drafted), _total(stats.target_calls))


def block_efficiency(stats: Stats) -> float:
    """Emitted tokens per target call, after the cut at EOS, stop or budget."""
    return _ratio(_total(stats.emitted), _total(stats.target_calls))


def _total(counts: Array | np.ndarray) -> int:
    return int(np.sum(np.asarray(counts), dtype=np.int64))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan
