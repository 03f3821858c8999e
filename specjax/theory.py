"""The arithmetic of speculative decoding: what alpha, survival and costs predict.

Costs are in units of one target step (one token per row): c is the cost of drafting one
token, v(n) that of a target pass over n tokens. Numbers or NumPy arrays in and out.

Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), of which equation and theorem numbers
are quoted; it assumes that drafts are accepted independently of each other, each with
probability alpha, and that v(n) = 1. The functions that take a survival assume neither.

Beside it: `theory_laws`, what the models' laws say before anything is decoded;
`theory_blocks`, blocks drafted in one pass; `roofline`, c and v of a device.
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
    alpha = within("alpha", alpha, 0.0, 1.0)
    gamma = within("gamma", gamma, 0.0, np.inf)
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
    gamma = within("gamma", gamma, 0.0, np.inf)
    c = within("c", c, 0.0, np.inf)
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
    gamma = within("gamma", gamma, 0.0, np.finfo(float).max)
    c_hat = within("c_hat", c_hat, 0.0, np.inf)
    return _plain((gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma))


def best_gamma(alpha: Numbers, c: Numbers, max_gamma: int = 64) -> int | np.ndarray:
    """The draft length of greatest `walltime_factor`; 0 where plain decoding is best.

    Above 0 if and only if `drafting_helps`.

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
    within("max_gamma", max_gamma, 0, np.inf)
    gammas = np.arange(max_gamma + 1)
    alphas, costs = np.asarray(alpha, float), np.asarray(c, float)
    return _first_best(walltime_factor(alphas[..., None], gammas, costs[..., None]))


def drafting_helps(alpha: Numbers, c: Numbers) -> bool | np.ndarray:
    """Whether some draft length beats plain decoding: where alpha > c, Cor 3.9.

    Args:
        alpha: acceptance probability, in [0, 1].
        c: draft step / target step, >= 0.

    Raises:
        ValueError: an argument outside its range.

    >>> drafting_helps(0.3, 0.29), drafting_helps(0.3, 0.3)
    (True, False)
    """
    alpha, c = within("alpha", alpha, 0.0, 1.0), within("c", c, 0.0, np.inf)
    helps = alpha > c
    return bool(helps) if np.ndim(helps) == 0 else helps


def least_gain(alpha: Numbers, c: Numbers) -> float | np.ndarray:
    """What the best draft length gives at least, ``(1 + alpha) / (1 + c)``, Cor 3.9.

    It is what a draft of one token gives.

    Args:
        alpha: acceptance probability, in [0, 1].
        c: draft step / target step, >= 0.

    Returns:
        the factor over plain decoding; at most 1 where no draft helps.

    Raises:
        ValueError: an argument outside its range.

    >>> least_gain(0.75, 0.25)
    1.4
    """
    alpha, c = within("alpha", alpha, 0.0, 1.0), within("c", c, 0.0, np.inf)
    return _plain((1 + alpha) / (1 + c))


def iid_survival(alpha: Number, gamma: int) -> np.ndarray:
    """Survival by depth under the paper's assumption: alpha, alpha^2, .. alpha^gamma.

    >>> iid_survival(0.5, 3).tolist()
    [0.5, 0.25, 0.125]
    """
    within("alpha", alpha, 0.0, 1.0)
    within("gamma", gamma, 0, np.inf)
    return float(alpha) ** np.arange(1, gamma + 1)


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
    survival = checked_survival(survival)
    cost = round_cost(len(survival), c, verify_ratio)
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
    survival = checked_survival(survival)
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


def one_more_pays(
    survival: PerDepth,
    c: Number,
    verify_ratio: Number = 1.0,
    longer_verify_ratio: Number | None = None,
) -> bool:
    """Whether a draft of gamma tokens gains by one more, the marginal stopping test.

    ``A_(gamma+1) > S(gamma) (c + v(gamma+2) - v(gamma+1))``: a token must bring more
    per unit of time than the draft does without it. Where v rises in steps, a longer
    draft may pay although one more token does not: see `best_gamma_from_survival`.

    Args:
        survival: A_i for i = 1 .. gamma + 1; the last is that of the token in question.
        c: cost of drafting one token, in target steps, >= 0.
        verify_ratio: v(gamma + 1), cost of the target pass without it; v(1) = 1.
        longer_verify_ratio: v(gamma + 2), with it; None: the same.

    Raises:
        ValueError: as `speedup_from_survival`, or a survival of no depth at all.

    >>> one_more_pays([0.75, 0.6, 0.5], 0.1), one_more_pays([0.75, 0.6, 0.5], 0.5)
    (True, False)
    >>> one_more_pays([0.75, 0.6, 0.5], 0.1, 1.0, 1.2)
    False
    """
    values = checked_survival(survival)
    if not len(values):
        raise ValueError("survival is empty: it must end with the token in question")
    longer = verify_ratio if longer_verify_ratio is None else longer_verify_ratio
    within("longer_verify_ratio", longer, np.finfo(float).tiny, np.inf)
    speedup = speedup_from_survival(values[:-1], c, verify_ratio)
    return bool(values[-1] - speedup * (c + longer - verify_ratio) > _TIE)


def expected_calls(survival: PerDepth, tokens: int | np.integer) -> float:
    """Expected target calls for a row of so many tokens, whose last round is cut short.

    Rounds are taken to be alike and independent. `tokens` over the mean of a whole
    round, 1 + sum A_i, is less: what the last one accepts beyond the end is lost.

    Args:
        survival: see `speedup_from_survival`.
        tokens: that the row has in the end, EOS included.

    Raises:
        ValueError: as `speedup_from_survival`, or tokens that are no whole number >= 0.

    >>> calls = expected_calls(iid_survival(0.75, 7), 20)
    >>> round(calls, 2), round(1 - 20 / expected_tokens(0.75, 7) / calls, 3)
    (6.14, 0.096)
    """
    if not isinstance(tokens, int | np.integer) or tokens < 0:
        raise ValueError(f"tokens is {tokens!r}: a whole number of at least 0")
    stands = np.concatenate(([1.0], checked_survival(survival), [0.0]))
    emits = stands[:-1] - stands[1:]  # k + 1 tokens in a round
    calls = [0.0]
    for left in range(1, tokens + 1):
        reach = min(left, len(emits))
        rest = [calls[left - 1 - more] for more in range(reach)]
        calls.append(float(1 + emits[:reach] @ np.array(rest)))
    return calls[-1]


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
    tokens = float(within("tokens", tokens, 0.0, np.inf))
    calls = float(within("target_calls", target_calls, 1.0, np.inf))
    encode = float(within("encode", encode, 0.0, np.inf))
    draft_encode = float(within("draft_encode", draft_encode, 0.0, np.inf))
    loop = calls * round_cost(gamma, c, verify_ratio)
    return (encode + tokens) / (encode + draft_encode + loop)


def round_cost(gamma: Number, c: Number, verify_ratio: Number) -> float:
    """``gamma c + v``, cost of one round in target steps; refuses what is no cost."""
    within("gamma", gamma, 0, np.inf)
    within("c", c, 0.0, np.inf)
    within("verify_ratio", verify_ratio, np.finfo(float).tiny, np.inf)
    return float(gamma * c + verify_ratio)


def within(
    name: str, value: Numbers | PerDepth, low: Number, high: Number
) -> np.ndarray:
    """The value as an array; refused by its name unless all of it is in the range."""
    value = np.asarray(value, float)
    if not np.all((value >= low) & (value <= high)):  # NaN fails too
        raise ValueError(f"{name} is {value}: it must lie in [{low:g}, {high:g}]")
    return value


def _times(gamma: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``gamma * c``, where drafting forever at no cost costs nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(c == 0, 0.0, gamma * c)


def checked_survival(survival: PerDepth) -> np.ndarray:
    """A survival as an array; refused if it is none."""
    values = np.asarray(survival, float)
    if values.ndim != 1:
        raise ValueError(f"survival has shape {values.shape}: one number per depth")
    values = within("survival", values, 0.0, 1.0)
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
