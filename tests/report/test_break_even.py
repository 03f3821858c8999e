"""One pass against token by token: what the table says of made-up measurements."""

from __future__ import annotations

import pytest

from specjax import theory, theory_blocks
from specjax.report import break_even


def row(method, survival, gamma, c, v, mode="greedy"):
    return {
        "task": "ende",
        "level": "base",
        "mode": mode,
        "method": method,
        "survival": list(survival),
        "gamma": gamma,
        "c": c,
        "v": v,
        "speedup": theory.speedup_from_survival(survival[:gamma], c, v),
    }


@pytest.mark.parametrize("decay, faster", [(0.95, True), (0.5, False)])
def test_one_pass_wins_above_the_line(decay, faster):
    slots = theory_blocks.decaying_survival(0.8, decay, 7)
    block = row("parallel", slots, 6, 0.1 / 6, 1.3)
    chain = row("parallel_chain", theory.iid_survival(0.8, 7), 4, 0.1, 1.2)
    (found,) = break_even.compare([row("ngram", slots, 3, 0, 1.2), chain, block])
    assert found["decay"] == pytest.approx(decay)
    assert found["alpha"] == pytest.approx(0.8)
    assert found["c_pass"] == pytest.approx(0.1)
    assert (found["decay"] > found["break_even"]) == faster
    # Made of the same numbers, measured and predicted are one.
    assert found["predicted"] == pytest.approx(found["measured"])
    assert (found["predicted"] > 1) == faster
    table = break_even.markdown([found])
    assert f"| {found['break_even']:.2f} |" in table and "| ende | base |" in table


def test_a_case_that_lacks_one_way_is_left_out():
    slots = theory.iid_survival(0.8, 3)
    rows = [
        row("parallel", slots, 3, 0.1, 1.2),
        row("parallel_chain", slots, 3, 0.1, 1.2, mode="sampled"),
    ]
    assert break_even.compare(rows) == []
    assert break_even.markdown([]) == ""
