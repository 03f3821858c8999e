"""A decoder as slow and plain as can be, which the real one must equal.

One row at a time, without a cache, in NumPy and Python's lists: every law is asked for
anew with the whole text. It was written from Algorithm 1 of Leviathan, Kalman, Matias
2023 (arXiv:2211.17192), in float64, and calls nothing of `specjax.decoding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.proof.tables import reference_law

Law = np.ndarray  # of the next token, [V]


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of one row.

    Attributes:
        text: its tokens, prefix included.
        target_calls: how often the target was asked.
        drafted: by depth, how many of these calls had a draft so deep.
        accepted: by depth, how many of those drafts stood.
    """

    text: list[int]
    target_calls: int
    drafted: list[int]
    accepted: list[int]


def decode(
    prefix: Sequence[int],
    *,
    target: Callable[[list[int]], Law],
    draft: Callable[[list[int], int, int], Law],
    draft_length: Callable[[int], int],
    coin: Callable[[int, int], float],
    pick: Callable[[int, int | None, Law], int],
    room: int,
    gamma: int,
    eos_id: int | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Written:
    """Writes one row.

    Args:
        prefix: what stands already.
        target: the law that follows a text.
        draft: the same of the draft, of a text and the numbers of call and depth.
        draft_length: how many tokens are drafted for a call.
        coin: the number in [0, 1) that judges the draft of a call at a depth.
        pick: draws from a law, for a call and a depth; None: what follows the drafts.
        room: most tokens to write.
        gamma: the deepest draft, for the counts.
        eos_id: ends the row.
        stop: sequences that end it, once it has written one.
    """
    text, calls = list(prefix), 0
    drafted, accepted = [0] * gamma, [0] * gamma
    finished = room <= 0
    while not finished:
        block: list[int] = []
        laws: list[Law] = []
        for depth in range(draft_length(calls)):
            laws.append(draft(text + block, calls, depth))
            block.append(pick(calls, depth, laws[-1]))
            drafted[depth] += 1
        stands = 0
        for depth, (token, q) in enumerate(zip(block, laws, strict=True)):
            p = target(text + block[:depth])
            if not coin(calls, depth) * q[token] < p[token]:
                break
            accepted[depth] += 1
            stands += 1
        law = target(text + block[:stands])
        if stands < len(block):
            residual = np.maximum(law - laws[stands], 0)
            law = residual / residual.sum()
        block = [*block[:stands], pick(calls, None, law)]
        calls += 1
        for token in block:
            text.append(token)
            new = text[len(prefix) :]
            ended = token == eos_id or any(new[-len(own) :] == [*own] for own in stop)
            finished = ended or len(new) == room
            if finished:
                break
    return Written(text, calls, drafted, accepted)


def plain(
    prefix: Sequence[int], target: Callable[[list[int]], Law], room: int, **ends: Any
) -> list[int]:
    """The greedy text, without a draft."""
    return decode(
        prefix,
        target=target,
        draft=lambda text, call, depth: np.zeros(0),
        draft_length=lambda call: 0,
        coin=lambda call, depth: 0.0,
        pick=lambda call, depth, law: int(np.argmax(law)),
        room=room,
        gamma=0,
        **ends,
    ).text


def hash_law(
    table: Any, source: Sequence[int], **settings: Any
) -> Callable[[list[int]], Law]:
    """The laws of a `helpers.HashModel` before one source.

    Args:
        table: its logits.
        source: tokens, without padding.
        **settings: of `reference_law`: temperature, top_k, top_p.
    """
    table = np.asarray(table)
    fixed = sum((token + 1) * (31 * i + 7) for i, token in enumerate(source))

    def law(text: list[int]) -> Law:
        seen = sum((token + 1) * (17 * i + 3) for i, token in enumerate(text))
        return reference_law(table[(seen + fixed) % len(table)], **settings)

    return law
