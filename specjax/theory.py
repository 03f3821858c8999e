"""The arithmetic of speculative decoding: what alpha, survival and costs predict.

Costs are in units of one target step (one token per row): c is the cost of drafting one
token, v(n) that of a target pass over n tokens. Numbers or NumPy arrays in and out.

Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), of which equation and theorem numbers
are quoted; it assumes that drafts are accepted independently of each other, each with
probability alpha, and that v(n) = 1. The functions that take a survival assume neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Number = float | int | np.number
Numbers = Number | np.ndarray
PerDepth = np.ndarray | Sequence[float] | Sequence[int]

# A longer draft must win by more than rounding to be called better.
_TIE = 1e-12


def expected_tokens(alpha: Numbers, gamma: Numbers) -> float | np.ndarray:
    """Expected tokens per target call, ``(1 - alpha^(gamma+1)) / (1 - alpha)``, Eq. 1.

    Args:
        alpha: probability that a drafted token is accepted, in [0, 1].
        gamma: drafted tokens per target call, >= 0; may be infinite.

    Returns:
        between 1 and gamma + 1.

    Raises:
        ValueError: alpha or gamma outside its range.

    >>> round(expected_tokens(0.75, 7), 2)
    3.6
    >>> expected_tokens(1.0, 7), expected_tokens(0.75, float("inf"))
    (8.0, 4.0)
    """
    alpha = _within("alpha", alpha, 0.0, 1.0)
    gamma = _within("gamma", gamma, 0.0, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        # expm1 keeps the difference exact where alpha is close to 1.
        geometric = -np.expm1((gamma + 1) * np.log(alpha)) / (1 - alpha)
    return _plain(np.where(alpha == 1, gamma + 1, geometric))


def walltime_factor(alpha: Numbers, gamma: Numbers, c: Numbers) -> float | np.ndarray:
    """Expected speedup over plain decoding where a target pass costs one step, Thm 3.8.

    Args:
        alpha: acceptance probability, in [0, 1].
        gamma: drafted tokens per target call, >= 0.
        c: draft step / target step, >= 0.

    Returns:
        ``expected_tokens / (gamma c + 1)``; above 1 is faster.

    Raises:
        ValueError: an argument outside its range.

    >>> round(walltime_factor(0.75, 7, 0.02), 3)
    3.157
    """
    gamma = _within("gamma", gamma, 0.0, np.inf)
    c = _within("c", c, 0.0, np.inf)
    return _plain(expected_tokens(alpha, gamma) / (_times(gamma, c) + 1))


def operation_factor(
    alpha: Numbers, gamma: Numbers, c_hat: Numbers
) -> float | np.ndarray:
    """Expected arithmetic per token over that of plain decoding, Thm 3.11.

    Args:
        alpha: acceptance probability, in [0, 1].
        gamma: drafted tokens per target call, >= 0 and finite.
        c_hat: arithmetic per token of the draft / of the target, >= 0.

    Returns:
        ``(gamma c_hat + gamma + 1) / expected_tokens``; above 1 is more arithmetic.

    Raises:
        ValueError: an argument outside its range.

    >>> round(operation_factor(0.8, 5, 0.0), 2)
    1.63
    """
    gamma = _within("gamma", gamma, 0.0, np.finfo(float).max)
    c_hat = _within("c_hat", c_hat, 0.0, np.inf)
    return _plain((gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma))


def best_gamma(alpha: Numbers, c: Numbers, max_gamma: int = 64) -> int | np.ndarray:
    """The draft length of greatest `walltime_factor`; 0 where plain decoding is best.

    A draft helps if and only if alpha > c (Cor 3.9).

    Args:
        alpha: acceptance probability, in [0, 1].
        c: draft step / target step, >= 0.
        max_gamma: the longest draft considered, >= 0. At c = 0 longer is always better.

    Returns:
        the shortest of the best lengths, in 0 .. max_gamma.

    Raises:
        ValueError: an argument outside its range.

    >>> best_gamma(0.75, 0.02), best_gamma(0.3, 0.3)
    (9, 0)
    """
    _within("max_gamma", max_gamma, 0, np.inf)
    gammas = np.arange(max_gamma + 1)
    alphas, costs = np.asarray(alpha, float), np.asarray(c, float)
    return _first_best(walltime_factor(alphas[..., None], gammas, costs[..., None]))


def iid_survival(alpha: Number, gamma: int) -> np.ndarray:
    """Survival by depth under the paper's assumption: alpha, alpha^2, .. alpha^gamma.

    >>> iid_survival(0.5, 3).tolist()
    [0.5, 0.25, 0.125]
    """
    _within("alpha", alpha, 0.0, 1.0)
    _within("gamma", gamma, 0, np.inf)
    return float(alpha) ** np.arange(1, gamma + 1)


def decaying_survival(alpha: Number, decay: Number, gamma: int) -> np.ndarray:
    """Survival where each depth is accepted less often, by a constant factor.

    The i-th draft stands with probability ``alpha decay^(i-1)`` if those before it do:
    slots of a block that know nothing of each other's tokens.

    >>> decaying_survival(0.5, 0.5, 3).tolist()
    [0.5, 0.125, 0.015625]
    """
    _within("alpha", alpha, 0.0, 1.0)
    _within("decay", decay, 0.0, 1.0)
    _within("gamma", gamma, 0, np.inf)
    return np.cumprod(float(alpha) * float(decay) ** np.arange(gamma))


def speedup_from_survival(
    survival: PerDepth, c: Number, verify_ratio: Number = 1.0
) -> float:
    """Expected speedup ``(1 + sum A_i) / (gamma c + v)``, free of assumptions.

    It counts the loop alone: encoders, and tokens cut off at the end of a row, are the
    affair of `speedup_from_counts`.

    Args:
        survival: A_i for i = 1 .. gamma, the probability that the first i drafted
            tokens all stand, per target call; what was not drafted counts as rejected.
        c: cost of drafting one token, in target steps, >= 0.
        verify_ratio: v(gamma + 1), cost of the target pass that verifies, in target
            steps, > 0.

    Returns:
        the factor over plain decoding; above 1 is faster.

    Raises:
        ValueError: a survival that is no probability or rises with depth, or a cost
            outside its range.

    >>> round(speedup_from_survival([0.75, 0.6, 0.5], 0.1, 1.2), 3)
    1.9
    """
    survival = _checked_survival(survival)
    cost = _block_cost(len(survival), c, verify_ratio)
    return float((1 + survival.sum()) / cost)


def best_gamma_from_survival(
    survival: PerDepth,
    c: Number | PerDepth,
    verify_ratio: Number | PerDepth | Callable[[int], Number] = 1.0,
) -> int:
    """The draft length of greatest `speedup_from_survival`; 0: plain decoding is best.

    Survival down to a depth must not depend on gamma, as holds for token verification
    and for greedy decoding. With block verification measure each gamma by itself.

    Args:
        survival: A_i for i = 1 .. the longest draft considered.
        c: cost of drafting one token, in target steps; one number, or one per gamma
            from 1 on (a drafter of one pass costs less per token the more it drafts).
        verify_ratio: cost of the pass that verifies gamma drafts, in target steps; one
            number for all, one per gamma from 1 on, or a function of gamma.

    Returns:
        the shortest of the best lengths, in 0 .. len(survival).

    Raises:
        ValueError: as `speedup_from_survival`, or a list of another length than
            `survival`.

    >>> best_gamma_from_survival([0.75, 0.6, 0.5], 0.1, [1.0, 1.0, 1.4])
    2
    >>> best_gamma_from_survival([0.75, 0.6, 0.5], 0.1, lambda gamma: 1 + gamma)
    0
    """
    survival = _checked_survival(survival)
    gammas = range(1, len(survival) + 1)
    if callable(verify_ratio):
        ratios = np.array([verify_ratio(gamma) for gamma in gammas], float)
    else:
        ratios = _per_gamma("verify_ratio", verify_ratio, len(gammas))
    costs = _per_gamma("c", c, len(gammas))
    speedups = [1.0] + [
        speedup_from_survival(survival[:gamma], costs[gamma - 1], ratios[gamma - 1])
        for gamma in gammas
    ]
    return int(_first_best(np.array(speedups)))


def speedup_from_counts(
    tokens: Number,
    target_calls: Number,
    gamma: Number,
    c: Number,
    verify_ratio: Number = 1.0,
    encode: Number = 0.0,
    draft_encode: Number = 0.0,
) -> float:
    """Speedup of whole decodes ``(E + N) / (E + e + R (gamma c + v))``.

    Both ways pay for the target's encoder; only speculation pays for the draft's.

    Args:
        tokens: N, tokens emitted; in a batch, by the row that emits most, since a loop
            runs until its last row ends.
        target_calls: R, target calls that they took; in a batch, of the row that makes
            most.
        gamma: drafted tokens per target call, or their mean.
        c: cost of drafting one token, in target steps.
        verify_ratio: v(gamma + 1), cost of the target pass that verifies.
        encode: E, cost of the target's encoder, in target steps, for the same rows.
        draft_encode: e, cost of the drafter's set-up, its encoder included.

    Returns:
        the factor over plain decoding; above 1 is faster.

    Raises:
        ValueError: a count or a cost outside its range.

    >>> speedup_from_counts(30, 10, 4, 0.05, 1.2)
    2.142857142857143
    >>> speedup_from_counts(30, 10, 4, 0.05, 1.2, encode=6, draft_encode=4)
    1.5
    """
    tokens = float(_within("tokens", tokens, 0.0, np.inf))
    calls = float(_within("target_calls", target_calls, 1.0, np.inf))
    encode = float(_within("encode", encode, 0.0, np.inf))
    draft_encode = float(_within("draft_encode", draft_encode, 0.0, np.inf))
    loop = calls * _block_cost(gamma, c, verify_ratio)
    return (encode + tokens) / (encode + draft_encode + loop)


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
        one_pass: A, survival by slot; see `speedup_from_survival`.
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
    slots, depths = _checked_survival(one_pass), _checked_survival(one_by_one)
    fast = (1 + slots.sum()) / _block_cost(1, c_pass, verify_ratio)
    slow = (1 + depths.sum()) / _block_cost(len(depths), c, verify_ratio_one_by_one)
    return float(fast / slow)


def _block_cost(gamma: Number, c: Number, verify_ratio: Number) -> float:
    _within("gamma", gamma, 0, np.inf)
    _within("c", c, 0.0, np.inf)
    _within("verify_ratio", verify_ratio, np.finfo(float).tiny, np.inf)
    return float(gamma * c + verify_ratio)


def _within(
    name: str, value: Numbers | PerDepth, low: Number, high: Number
) -> np.ndarray:
    value = np.asarray(value, float)
    if not np.all((value >= low) & (value <= high)):  # NaN fails too
        raise ValueError(f"{name} is {value}: it must lie in [{low:g}, {high:g}]")
    return value


def _times(gamma: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``gamma * c``, where drafting forever at no cost costs nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(c == 0, 0.0, gamma * c)


def _checked_survival(survival: PerDepth) -> np.ndarray:
    values = np.asarray(survival, float)
    if values.ndim != 1:
        raise ValueError(f"survival has shape {values.shape}: one number per depth")
    values = _within("survival", values, 0.0, 1.0)
    if np.any(np.diff(values) > _TIE):
        raise ValueError(
            f"survival is {values}: it cannot rise with depth, since the first i + 1 "
            "drafts stand only where the first i do"
        )
    return values


def _per_gamma(name: str, value: Number | PerDepth, count: int) -> np.ndarray:
    values = np.asarray(value, float)
    if values.ndim and values.shape != (count,):
        raise ValueError(
            f"{name} has shape {values.shape}: one number, or one per gamma ({count})"
        )
    return np.broadcast_to(values, (count,))


def _first_best(speedups: Numbers) -> int | np.ndarray:
    speedups = np.asarray(speedups)
    best = speedups.max(-1, keepdims=True)
    first = np.argmax(speedups >= best * (1 - _TIE), axis=-1)
    return int(first) if np.ndim(first) == 0 else first


def _plain(value: Numbers) -> float | np.ndarray:
    return float(value) if np.ndim(value) == 0 else np.asarray(value)
