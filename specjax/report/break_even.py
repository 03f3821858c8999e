"""A block in one pass beside the same weights used a token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import theory, theory_blocks
from specjax.report.markdown import table as table_lines

Row = Mapping[str, Any]

# Methods of `configs/methods_ende.py`, and the drafter names behind them.
ONE_PASS, ONE_BY_ONE = "parallel", "parallel_chain"

_CAPTION = """
gain: one pass over token by token, each at its best draft length, of the loop; decay:
the factor by which each slot is accepted less often than the one before, under which
the slots' mean count of accepted drafts is the measured one. One pass wins where its
decay lies above the break-even line; 0: the first slot alone suffices; inf: nothing
would.
"""


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each case in which both ways were measured.

    Args:
        rows: of `experiments.compare`.

    Returns:
        By task, level and mode: ``alpha`` of the first slot, ``decay`` as measured,
        ``break_even``, the decay that would make both ways as fast, ``predicted`` and
        ``measured`` gain of one pass, and both draft lengths and costs.

    Source: `theory_blocks.one_pass_gain`.
    """
    where = ("task", "level", "mode")
    found = {(*(row[name] for name in where), row["method"]): row for row in rows}
    made = []
    for (*case, method), block in found.items():
        chain = found.get((*case, ONE_BY_ONE))
        if method != ONE_PASS or chain is None:
            continue
        gamma, count = int(block["gamma"]), int(chain["gamma"])
        slots = np.asarray(block["survival"][:gamma], float)
        depths = np.asarray(chain["survival"][:count], float)
        c_pass = gamma * block["c"]
        other = theory.speedup_from_survival(depths, chain["c"], chain["v"])
        made.append(
            dict(zip(where, case, strict=True))
            | {
                "gamma": gamma,
                "gamma_one_by_one": count,
                "alpha": float(slots[0]),
                "decay": theory_blocks.decay_of(slots[0], slots.sum(), gamma),
                "break_even": theory_blocks.break_even_decay(
                    slots[0], gamma, c_pass, block["v"], other
                ),
                "c_pass": c_pass,
                "c": chain["c"],
                "predicted": theory_blocks.one_pass_gain(
                    slots, depths, c_pass, chain["c"], block["v"], chain["v"]
                ),
                "measured": block["speedup"] / chain["speedup"],
            }
        )
    return made


_COLUMNS = (
    ("task", "task", "{}"),
    ("target's cost", "level", "{}"),
    ("run", "mode", "{}"),
    ("slots", "gamma", "{}"),
    ("c of the pass", "c_pass", "{:.3f}"),
    ("one by one", "gamma_one_by_one", "{}"),
    ("c", "c", "{:.3f}"),
    ("alpha of slot 1", "alpha", "{:.2f}"),
    ("decay", "decay", "{:.2f}"),
    ("break-even", "break_even", "{:.2f}"),
    ("predicted gain", "predicted", "{:.2f}x"),
    ("measured gain", "measured", "{:.2f}x"),
)


def markdown(rows: Sequence[Row]) -> str:
    """The cases as a table in Markdown; empty where there are none.

    Args:
        rows: of `compare`.
    """
    if not rows:
        return ""
    lines = table_lines(
        [title for title, _, _ in _COLUMNS],
        [form == "{}" for _, _, form in _COLUMNS],
        ([form.format(row[name]) for _, name, form in _COLUMNS] for row in rows),
    )
    return lines + _CAPTION
