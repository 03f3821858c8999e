"""The arithmetic of drafting a block in one pass, against drafting token by token.

Costs are in units of one target step, as in `specjax.theory`.
"""

from __future__ import annotations

import numpy as np

from specjax.theory import (
    Number,
    PerDepth,
    checked_survival,
    iid_survival,
    round_cost,
    speedup_from_survival,
    within,
)


def decaying_survival(alpha: Number, decay: Number, gamma: int) -> np.ndarray:
    """Survival where each depth is accepted less often, by a constant factor.

    The i-th draft stands with probability ``alpha decay^(i-1)`` if those before it do:
    slots of a block that know nothing of each other's tokens.

    >>> decaying_survival(0.5, 0.5, 3).tolist()
    [0.5, 0.125, 0.015625]
    """
    within("alpha", alpha, 0.0, 1.0)
    within("decay", decay, 0.0, 1.0)
    within("gamma", gamma, 0, np.inf)
    return np.cumprod(float(alpha) * float(decay) ** np.arange(gamma))


def one_pass_gain(
    one_pass: PerDepth,
    one_by_one: PerDepth,
    c_pass: Number,
    c: Number,
    verify_ratio: Number = 1.0,
    verify_ratio_one_by_one: Number | None = None,
) -> float:
    """Speed of drafting blocks in one pass over that of drafting token by token.

    ``(1 + sum A) / (c_pass + v) * (gamma c + v') / (1 + sum A')``, where A' and v'
    belong to the draft of gamma tokens one by one: at 1 both break even. One pass pays
    where c is large, since it loses tokens, not time.

    Args:
        one_pass: A, survival by slot; see `theory.speedup_from_survival`.
        one_by_one: A', of the other way, at its own gamma.
        c_pass: cost of the pass, in target steps, >= 0.
        c: cost of drafting one token the other way.
        verify_ratio: v, cost of the pass that verifies a block of one pass, in target
            steps, > 0.
        verify_ratio_one_by_one: v'; None: as v.

    Raises:
        ValueError: as `speedup_from_survival`.

    >>> chain, block = iid_survival(0.75, 2), decaying_survival(0.75, 0.8, 7)
    >>> round(one_pass_gain(block, chain, 0.33, 0.33), 2)
    1.37
    >>> chain = iid_survival(0.75, 7)
    >>> round(one_pass_gain(block, chain, 0.02, 0.02), 2)
    0.79
    """
    if verify_ratio_one_by_one is None:
        verify_ratio_one_by_one = verify_ratio
    tokens = 1 + checked_survival(one_pass).sum()
    fast = tokens / round_cost(1, c_pass, verify_ratio)
    slow = speedup_from_survival(one_by_one, c, verify_ratio_one_by_one)
    return float(fast / slow)


def decay_of(alpha: Number, accepted: Number, gamma: int) -> float:
    """The decay by slot under which `accepted` of gamma drafts stand on average.

    The inverse of ``decaying_survival(alpha, decay, gamma).sum()``. Of a survival that
    was measured it tells how fast slots lose; of the tokens that break even
    (`one_pass_gain`), how fast they may.

    Args:
        alpha: acceptance of the first slot.
        accepted: mean count of drafts that stand, >= 0.
        gamma: slots.

    Returns:
        0 where the first slot alone gives as many; inf where no decay at all is not
        enough.

    Raises:
        ValueError: a number outside its range.

    >>> round(decay_of(0.75, decaying_survival(0.75, 0.8, 7).sum(), 7), 6)
    0.8
    >>> decay_of(0.75, 0.5, 7), decay_of(0.75, 6, 7)
    (0.0, inf)
    """
    accepted = float(within("accepted", accepted, 0.0, np.inf))
    if accepted > iid_survival(alpha, gamma).sum():
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if decaying_survival(alpha, middle, gamma).sum() < accepted:
            low = middle
        else:
            high = middle
    return high if high > 1e-12 else 0.0


def break_even_decay(
    alpha: Number, gamma: int, c_pass: Number, verify_ratio: Number, speedup: Number
) -> float:
    """The decay by slot at which a block in one pass is as fast as another way.

    A one-pass drafter whose slots decay less (`decay_of` of its survival is above)
    is the faster.

    Args:
        alpha: acceptance of its first slot.
        gamma: its slots.
        c_pass: cost of its pass, in target steps.
        verify_ratio: v, of the pass that verifies the block.
        speedup: of the other way; see `speedup_from_survival`.

    Returns:
        0 where the first slot alone suffices; inf where it cannot be as fast.

    Raises:
        ValueError: a number outside its range.

    >>> other = speedup_from_survival(iid_survival(0.75, 2), 0.33)
    >>> round(break_even_decay(0.75, 7, 0.33, 1.0, other), 2)
    0.18
    """
    speedup = float(within("speedup", speedup, 0.0, np.inf))
    tokens = speedup * round_cost(1, c_pass, verify_ratio)
    return decay_of(alpha, max(tokens - 1, 0.0), gamma)
