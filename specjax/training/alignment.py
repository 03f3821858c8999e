"""Which source piece each target piece translates, learnt from pairs by counting.

IBM Model 1 (Brown et al. 1993, "The mathematics of statistical machine translation"):
every target piece is drawn from the dictionary of one of its sentence's source pieces,
all equally likely, or of an empty one; expectation maximisation finds the dictionaries.
A minute's counting gives `training.init` a start that gradient descent takes an hour to
find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax import errors

Example = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Links:
    """How often each source piece is behind each target piece, in expectation.

    Attributes:
        source: ids of source pieces, -1 for the empty one; one per link.
        target: ids of the target pieces that they are linked to.
        count: expected number of uses, > 0.
        source_count: uses of each id in sources, ``[V]``.
        target_count: uses of each id in targets, ``[V]``.
    """

    source: np.ndarray
    target: np.ndarray
    count: np.ndarray
    source_count: np.ndarray
    target_count: np.ndarray


def align(
    examples: Sequence[Example],
    vocab_size: int,
    *,
    iterations: int = 8,
    max_tokens: int = 24,
    max_examples: int = 60_000,
) -> Links:
    """Finds the links by expectation maximisation.

    Args:
        examples: source and target ids; end-of-sequence ids align like any other.
        vocab_size: ids of both sides.
        iterations: of expectation maximisation, >= 1.
        max_tokens: longer examples say little and cost much: they are not looked at.
        max_examples: the first so many short ones are looked at.

    Raises:
        InputError: no example is short enough.
    """
    short = [pair for pair in examples if max(map(len, pair)) <= max_tokens]
    short = short[:max_examples]
    if not short:
        raise errors.InputError(
            f"no training example has {max_tokens} tokens or fewer on both sides, so "
            "there is nothing to learn word alignments from: start from 'mimetic'"
        )
    # One row per pair of a target token and a source token, or the empty one (0).
    sources = [np.concatenate([[0], np.asarray(source) + 1]) for source, _ in short]
    targets = [np.asarray(target) for _, target in short]
    left = np.concatenate(
        [np.tile(s, len(t)) for s, t in zip(sources, targets, strict=True)]
    )
    right = np.concatenate(
        [np.repeat(t, len(s)) for s, t in zip(sources, targets, strict=True)]
    )
    widths = np.concatenate(
        [np.full(len(t), len(s)) for s, t in zip(sources, targets, strict=True)]
    )
    token = np.repeat(np.arange(len(widths)), widths)  # target token of each row

    names, kind = np.unique(left * vocab_size + right, return_inverse=True)
    source, target = names // vocab_size, names % vocab_size
    dictionary = np.ones(len(names))
    for _ in range(iterations):
        weight = dictionary[kind]
        weight /= np.bincount(token, weight)[token]
        count = np.bincount(kind, weight, minlength=len(names))
        dictionary = count / np.bincount(source, count)[source]
    real = count > 1e-3
    return Links(
        source=source[real] - 1,
        target=target[real],
        count=count[real],
        source_count=_uses([np.asarray(s) for s, _ in short], vocab_size),
        target_count=_uses(targets, vocab_size),
    )


def _uses(texts: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    return np.bincount(np.concatenate(texts), minlength=vocab_size)
