"""Cells of a comparison: kept at once, found again, refused where they do not fit."""

from __future__ import annotations

import pytest

from experiments import cells, method_costs
from specjax.errors import InputError

KEY = {"task": "ende", "mode": "greedy"}


def refuse():
    raise AssertionError("it is done already")


def test_a_cell_is_made_once(tmp_path):
    path = tmp_path / "cells.jsonl"
    store = cells.Cells(path, {"seed": 0})
    assert store.get(KEY, lambda: {"speed": 1.5, "by": {1: 2}}) == {
        "speed": 1.5,
        "by": {"1": 2},
    }
    for again in (store, cells.Cells(path, {"seed": 0})):
        assert again.get(dict(reversed(KEY.items())), refuse)["speed"] == 1.5
    other = cells.Cells(path, {"seed": 0})
    assert other.get(KEY | {"method": "ngram"}, lambda: {"speed": 2}) == {"speed": 2}
    assert other.failed == []


def test_a_line_that_was_cut_short_is_done_again(tmp_path):
    path = tmp_path / "cells.jsonl"
    store = cells.Cells(path, {})
    store.get(KEY, lambda: {"speed": 1})
    store.get(KEY | {"method": "x"}, lambda: {"speed": 2})
    path.write_text(path.read_text()[:-5])
    again = cells.Cells(path, {})
    assert again.get(KEY, refuse) == {"speed": 1}
    assert again.get(KEY | {"method": "x"}, lambda: {"speed": 3}) == {"speed": 3}
    last = cells.Cells(path, {})
    assert last.get(KEY | {"method": "x"}, refuse) == {"speed": 3}


def test_other_settings_are_refused(tmp_path):
    cells.Cells(tmp_path / "cells.jsonl", {"seed": 0})
    with pytest.raises(InputError, match="other settings, weights or lines"):
        cells.Cells(tmp_path / "cells.jsonl", {"seed": 1})


def test_a_cell_that_fails_is_listed_and_tried_again(tmp_path):
    def fail():
        raise ZeroDivisionError("by nothing")

    store = cells.Cells(tmp_path / "cells.jsonl", {})
    assert store.get(KEY, fail) is None
    assert store.failed == ["mode greedy, task ende: ZeroDivisionError: by nothing"]
    assert store.get(KEY, lambda: {"speed": 1}) == {"speed": 1}

    def wrong():
        raise InputError("config.x is wrong")

    with pytest.raises(InputError, match="config.x"):
        store.get(KEY | {"method": "x"}, wrong)


def test_the_best_draft_length_is_found():
    """Costs by hand: a step of 1 s, drafts of 0.1 s a token, a flat verification."""
    target = {"step": 1.0, "gammas": [1, 3, 7], "verify": [1.0, 1.2, 1.6]}
    draft = {"gammas": [2, 7], "seconds": [0.2, 0.7]}
    survival = [0.8, 0.64, 0.5, 0.0, 0.0, 0.0, 0.0]
    choices = method_costs.predict(survival, target, draft)
    assert [choice["gamma"] for choice in choices] == [1, 2, 3, 4, 5, 6, 7]
    assert [choice["v"] for choice in choices[:4]] == pytest.approx([1, 1.1, 1.2, 1.3])
    assert all(choice["c"] == pytest.approx(0.1) for choice in choices)
    assert choices[2]["predicted"] == pytest.approx((1 + 1.94) / (0.3 + 1.2))
    assert max(choices, key=lambda own: own["predicted"])["gamma"] == 3
    # A block in one pass: what is saved on short ones is half of it at most.
    flat = {"gammas": [2, 7], "seconds": [0.2, 0.9]}
    assert method_costs.predict(survival, target, flat)[0]["c"] == pytest.approx(0.1)
