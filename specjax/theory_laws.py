"""What the laws of target and draft say of speculation before anything is decoded.

A law is a row of probabilities, of the next token after one prefix; alpha is the mean
of an acceptance over prefixes that the target wrote.
"""

from __future__ import annotations

import numpy as np

from specjax.theory import Number, Numbers, within

# Rows of float32 laws sum to 1 up to rounding; those of logits or counts do not.
_ROUNDING = 1e-3


def lenient_acceptance(
    p: np.ndarray, q: np.ndarray, lenience: Number
) -> float | np.ndarray:
    """Probability that a draft stands where q counts only `lenience` times.

    ``sum min(p / lenience, q)``, over tokens. The token that comes out has at most
    p / lenience of probability, and one that p has may vanish.

    Args:
        p: ``[..., V]`` the target's laws, as they are sampled from.
        q: ``[..., V]`` the draft's.
        lenience: in (0, 1]; at 1 nothing is lost and it is ``sum min(p, q)``, Thm 3.5.

    Returns:
        one number per row; their mean is alpha.

    Raises:
        ValueError: rows that are no laws or of unlike length, or a lenience outside its
            range.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), A.5.

    >>> p, q = np.array([0.5, 0.4, 0.1]), np.array([0.2, 0.2, 0.6])
    >>> round(lenient_acceptance(p, q, 1.0), 6), round(lenient_acceptance(p, q, 0.5), 6)
    (0.5, 0.6)
    """
    p, q = _checked_laws("p", p), _checked_laws("q", q)
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(f"q has {q.shape[-1]} tokens and p has {p.shape[-1]}")
    accepted = np.minimum(p / _checked_lenience(lenience), q).sum(-1)
    return float(accepted) if np.ndim(accepted) == 0 else accepted


def lenient_greedy_acceptance(
    p: np.ndarray, drafted: np.ndarray | int, lenience: Number
) -> bool | np.ndarray:
    """Whether a draft stands where greedy decoding takes what is nearly the best.

    ``p(x) >= lenience max p``. A law of temperature 0 is a point, on which
    `lenient_acceptance` does nothing; so this looks at the law at temperature 1. The
    paper prints the inequality the other way round.

    Args:
        p: ``[..., V]`` the target's laws at temperature 1.
        drafted: ``[...]`` the id that was drafted after each prefix.
        lenience: in (0, 1]; at 1 only the best stands.

    Returns:
        one truth per row; their mean is alpha.

    Raises:
        ValueError: rows that are no laws, ids that they do not have, or a lenience
            outside its range.

    Source: Leviathan et al. 2023 (arXiv:2211.17192), A.5.

    >>> p = np.array([0.5, 0.4, 0.1])
    >>> lenient_greedy_acceptance(p, 1, 1.0), lenient_greedy_acceptance(p, 1, 0.8)
    (False, True)
    """
    p, ids = _checked_laws("p", p), np.asarray(drafted)
    if ids.dtype.kind not in "iu" or np.any((ids < 0) | (ids >= p.shape[-1])):
        raise ValueError(f"drafted is {drafted}: ids from 0 to {p.shape[-1] - 1}")
    if ids.shape != p.shape[:-1]:
        raise ValueError(
            f"drafted has shape {ids.shape}: one id per law {p.shape[:-1]}"
        )
    bar = _checked_lenience(lenience) * p.max(-1)
    stands = np.take_along_axis(p, ids[..., None], -1)[..., 0] >= bar
    return bool(stands) if np.ndim(stands) == 0 else stands


def entropy_leading_term(
    entropy: Number, log_moment: Number, budget: Numbers
) -> float | np.ndarray:
    """Leading term ``(mu + mu_2) log P / mu^2`` of a bound on tokens per target call.

    The bound holds for every deterministic choice of what to verify, drafts and trees,
    and has a constant besides that is not known: this is no bound but how one grows
    with P, and measured tokens may lie above it.

    Args:
        entropy: mu, mean of ``-sum p log p`` over prefixes, in nats, > 0.
        log_moment: mu_2, mean of ``sum p (log p)^2``, >= mu^2.
        budget: P, tokens that a target call verifies, >= 1; one number or a curve's.

    Returns:
        tokens.

    Raises:
        ValueError: an argument outside its range.

    Source: Pankratov, Alistarh 2025 (arXiv:2512.11718).

    >>> round(entropy_leading_term(1.0, 2.0, 8), 2)  # 3 log 8
    6.24
    """
    mu = within("entropy", entropy, np.finfo(float).tiny, np.inf)
    # Its least value is reached where -log p is the same everywhere.
    mu_2 = within("log_moment", log_moment, float(mu**2) * (1 - 1e-6), np.inf)
    term = (mu + mu_2) * np.log(within("budget", budget, 1.0, np.inf)) / mu**2
    return float(term) if np.ndim(term) == 0 else term


def _checked_lenience(lenience: Number) -> np.ndarray:
    return within("lenience", lenience, np.finfo(float).tiny, 1.0)


def _checked_laws(name: str, laws: np.ndarray) -> np.ndarray:
    laws = np.asarray(laws, float)
    if laws.ndim == 0:
        raise ValueError(f"{name} is {laws}: a law has one probability per token")
    within(name, laws, 0.0, 1.0 + _ROUNDING)
    sums = laws.sum(-1)
    if not np.all(np.abs(sums - 1) <= _ROUNDING):
        raise ValueError(f"{name} sums to {sums}: a law sums to 1")
    return laws
