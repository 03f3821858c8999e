"""The comparison of drafters: every cell once, its reports, and what it refuses."""

from __future__ import annotations

import csv
import json

import pytest

from configs import methods_ende
from experiments import compare
from specjax.errors import InputError
from tests import pairs
from tests.helpers import quick_compile  # noqa: F401

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folders = pairs.make_pair(tmp_path_factory.mktemp("task"))
    made = methods_ende.get_config()
    with made.unlocked():
        made.tasks, made.levels = ("tiny",), ("shipped", "wider")
        made.task = dict(
            tiny=dict(
                folder=str(folders.target.parent),
                task_prefix="",
                input=str(folders.input),
            )
        )
        made.level = dict(
            shipped=dict(widen="", lines=3, repeats=1),
            wider=dict(widen="t5-v1_1-small", lines=1, repeats=1),
        )
        for name in list(made.method):
            if name not in ("model", "ngram", "model_confidence"):
                del made.method[name]
    made.update(gamma=pairs.GAMMA, max_length=pairs.MAX_LENGTH, seeds=2)
    made.buckets = (pairs.BUCKET,)
    made.timing.update(seconds=0.001, repeats=1)
    return made


@pytest.mark.slow
def test_every_cell_is_measured_once(config, tmp_path, monkeypatch):
    own = config.copy_and_resolve_references()
    own.levels = ("shipped",)
    assert compare.main(own, tmp_path, None) == 0
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert [(row["mode"], row["method"]) for row in rows] == [
        (mode, name) for mode in compare.MODES for name in own.method
    ]
    for row in rows:
        assert row["speedup"] > 0 and row["predicted_whole"] > 0
        assert 1 <= row["gamma"] <= pairs.GAMMA and row["mismatches"] == 0
        assert 1 <= row["tokens_per_call"] <= row["gamma"] + 1
        assert row["megabytes"] >= 0 and 0 < row["draft_share"] < 1
        best = max(choice["predicted"] for choice in row["choices"])
        assert row["predicted"] == best
    by_name = {row["method"]: row for row in rows if row["mode"] == "greedy"}
    # The draft is part of the target, and agrees; a rule drafts no more than asked.
    assert by_name["model"]["survival"][0] > 0.3
    assert by_name["model"]["megabytes"] > by_name["ngram"]["megabytes"] == 0
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    assert (tmp_path / "methods.md").read_text().count("| tiny |") == len(rows)
    with open(tmp_path / "methods.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(line["speedup"]) for line in table] == [r["speedup"] for r in rows]
    assert float(table[0]["survival_1"]) == rows[0]["survival"][0]

    def refuse(*arguments):
        raise AssertionError("it was measured before")

    for name in ("measure", "count"):
        monkeypatch.setattr(compare, name, refuse)
    monkeypatch.setattr(compare.method_costs, "target_costs", refuse)
    compare.main(own, tmp_path, None)
    assert json.loads((tmp_path / "metrics.json").read_text())["rows"] == rows
    # A part of it asks for no other numbers; other weights or lines do.
    own.methods = "ngram"
    with pytest.raises(InputError, match="other settings, weights or lines"):
        own.seed = 1
        compare.main(own, tmp_path, None)


@pytest.mark.slow
def test_a_wider_target_writes_the_same(config, tmp_path):
    own = config.copy_and_resolve_references()
    own.levels, own.methods = ("wider",), "model"
    assert compare.main(own, tmp_path, None) == 0
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert [row["mismatches"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    "setting, value, named",
    [
        ("methods", "medusa", "config.methods has 'medusa'"),
        ("tasks", "other", "config.tasks has 'other'"),
        ("levels", (), "config.levels is"),
        ("gamma", 0, "config.gamma is 0"),
        ("task.tiny.folder", "nowhere", "config.task.tiny.folder is"),
        ("task.tiny.input", "", "--input is missing"),
        ("level.shipped.lines", 0, "config.level.shipped.lines is 0"),
        ("method.model.drafter", "x", "the method model of tiny: config.drafter is"),
        ("method.model.draft", {"y": 1}, "config.method.model.draft has a setting"),
        ("method.model.checkpoint", "{folder}/no", "the method model of tiny"),
    ],
)
def test_what_is_wrong_is_named(config, tmp_path, setting, value, named):
    own = config.copy_and_resolve_references()
    own.methods = "model"
    with own.unlocked():
        *path, name = setting.split(".")
        inner = own
        for part in path:
            inner = inner[part]
        if name in inner:
            del inner[name]
        inner[name] = value
    with pytest.raises(InputError, match=named):
        compare.main(own, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
