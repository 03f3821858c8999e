"""The reproduction of the paper: every cell once, what is refused, and its laws."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from configs import leviathan, t5_11b_cnndm, t5_11b_ende
from experiments import (
    acceptance,
    build,
    reproduce,
    reproduce_cells,
    reproduce_laws,
    reproduce_tasks,
    reproduce_times,
)
from specjax.drafters import files, tables
from specjax.errors import InputError
from specjax.models import t5_weights
from specjax.models.t5_config import T5Config
from tests import pairs
from tests.helpers import quick_compile  # noqa: F401

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Flags:
    """What the command line would give."""

    def __init__(self, only=None):
        self.only = only


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.make_pair(tmp_path_factory.mktemp("task"))


@pytest.fixture
def config(folders):
    made = leviathan.get_config()
    with made.unlocked():
        own = dict(folder=str(folders.target.parent), paper="EnDe", counts="")
        own |= dict(task_prefix="", input=str(folders.input))
        made.task = dict(tiny=own)
        cost = dict(widen="", drafts=("shipped", "self"), lines=3, repeats=1)
        made.target_cost = dict(own=cost | dict(recompute=True))
        made.draft_cost = dict(
            shipped=dict(checkpoint="", widen="", paper="T5-small"),
            # It drafts for itself, so that every draft stands.
            self=dict(checkpoint=str(folders.target), widen="", paper="T5-large"),
        )
    made.figure5.update(task="tiny", target="own", draft="shipped", gammas=(2,))
    made.update(gammas=(2,), max_length=pairs.MAX_LENGTH, buckets=(pairs.BUCKET,))
    made.acceptance.update(draws=2, depth=3, batch_size=8)
    made.timing.update(seconds=0.001, repeats=1)
    return made


def read(folder, name="metrics.json"):
    return json.loads((folder / name).read_text())


def test_a_table_of_formulas_needs_no_model(config, tmp_path):
    config.task.tiny.folder = str(tmp_path / "nowhere")
    only = Flags("table1,figure2,figure3,figure4")
    assert reproduce.main(config, tmp_path, only) == 0
    assert len(read(tmp_path)["table1"]) == 6
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3 and "6.86x" in page
    with pytest.raises(InputError, match="config.task.tiny.folder is"):
        reproduce.main(config, tmp_path, Flags("table3"))


def test_parts_are_chosen_by_name():
    assert reproduce.chosen(None) == list(reproduce.PARTS)
    assert reproduce.chosen("figure1, table4") == ["table2", "figure1"]
    with pytest.raises(
        InputError, match="--only has 'table6': it takes some of table1"
    ):
        reproduce.chosen("table1,table6")


def test_sizes_are_chosen_by_name():
    full = leviathan.get_config("full")
    assert full.dtype == "bfloat16" and full.target_cost.xxl.widen == "t5-v1_1-xxl"
    assert {name: own.paper for name, own in full.draft_cost.items()} == {
        size: f"T5-{size}" for size in full.target_cost.xxl.drafts
    }
    with pytest.raises(ValueError, match="leviathan.py:huge: small or full"):
        leviathan.get_config("huge")


@pytest.mark.parametrize("which", ["small", "full", "ende", "cnndm"])
def test_configs_that_ship_are_whole(which):
    others = {"ende": t5_11b_ende, "cnndm": t5_11b_cnndm}
    if which in others:
        made = others[which].get_config()
        assert all(cost.widen == "" for cost in made.target_cost.values())
        (task,) = made.task
        assert made.task[task].task_prefix.endswith(": ") and made.figure5.task == task
        with pytest.raises(InputError, match="config.target.checkpoint is empty"):
            reproduce.read_tasks(made, reproduce.check(made), frozenset({"times"}))
    else:
        made = leviathan.get_config(which)
        assert reproduce.check(made) == list(made.target_cost)
    for cost in (*made.target_cost.values(), *made.draft_cost.values()):
        assert not cost.widen or T5Config.preset(cost.widen)


@pytest.mark.parametrize(
    "setting, value, named",
    [
        ("tasks", "other", "config.tasks has 'other'"),
        ("target_costs", "huge", "config.target_costs has 'huge'"),
        ("target_cost.own.drafts", ("x",), "config.target_cost.own.drafts has 'x'"),
        ("target_cost.own.lines", 0, "config.target_cost.own.lines is 0"),
        ("draft_cost.self.paper", "T5", "config.draft_cost.self.paper is 'T5'"),
        ("draft_cost.self.checkpoint", "", "config.draft_cost.self is the same model"),
        ("draft_cost.self.checkpoint", "no", "config.draft_cost.self.checkpoint is"),
        ("draft.checkpoint", "no", "config.draft.checkpoint is 'no'"),
        ("target.checkpoint", "no", "config.target.checkpoint is 'no'"),
        ("task.tiny.paper", "lm1b", "config.task.tiny.paper is 'lm1b'"),
        ("task.tiny.input", "", "--input is missing"),
        ("gammas", (0,), r"config.gammas is \(0,\)"),
        ("gammas", (9,), "config.acceptance.depth is 3"),
        ("leniences", (0.5,), "config.leniences is"),
        ("figure5.target", "xl", "config.figure5.target is 'xl'"),
        ("dtype", "int8", "config.dtype is 'int8'"),
        ("acceptance.draws", 0, "config.acceptance.draws is 0"),
    ],
)
def test_what_is_wrong_is_named(config, tmp_path, setting, value, named):
    with config.unlocked():
        *path, name = setting.split(".")
        inner = config
        for part in path:
            inner = inner[part]
        inner[name] = value
    with pytest.raises(InputError, match=named):
        reproduce.main(config, tmp_path / "out", Flags())
    assert not (tmp_path / "out").exists()


def test_a_pair_that_does_not_fit_is_refused_before_loading(
    config, tmp_path, monkeypatch
):
    def refuse(*arguments):
        raise AssertionError("it was loaded")

    monkeypatch.setattr(build, "load_target", refuse)
    config.target_cost.own.widen = "t5-v1_1-xxl"
    monkeypatch.setattr(reproduce_tasks, "there", lambda: 30_000_000_000)
    named = (
        r"config.target_cost.own with the draft shipped does not fit: it takes 44\.\d "
        r"GB in float32 and 30\.0 GB are there; in bfloat16 it takes 22\.\d GB"
    )
    with pytest.raises(InputError, match=named):
        reproduce.main(config, tmp_path / "out", Flags("table2"))
    monkeypatch.setattr(reproduce_tasks, "there", lambda: 10_000_000_000)
    with pytest.raises(InputError, match="a mesh of 3 such devices would hold it"):
        reproduce.main(config, tmp_path / "out", Flags("figure5"))
    assert not (tmp_path / "out").exists()


def test_memory_is_known_here():
    assert reproduce_tasks.there() > 100_000_000


@pytest.fixture
def written(config):
    task = reproduce_tasks.Task.read(config, "tiny")
    target = build.load_target(task.decode_config())
    return task, target, [reproduce_laws.write(task, target, t) for t in (0, 1)]


@pytest.mark.slow
def test_alpha_is_what_teacher_forcing_says(written):
    task, target, writings = written
    pair = build.build_pair(task.decode_config(draft="shipped"), target)
    for own in writings:
        judged = reproduce_laws.judge(own, own.model(pair), (1.0, 0.5, 0.1), 3)
        draws = task.config.acceptance.draws if own.temperature else 1
        rows = [row for row in task.rows for _ in range(draws)]
        known = acceptance.accept(
            pair,
            task.parts(rows, min(8, len(rows))),
            build.row_keys(task.config.seed, len(rows)),
            sampling=reproduce_laws.sampling_of(own.temperature, target.num_tokens),
            draft_sampling=None,
            max_length=task.config.max_length,
            longest=3,
        )
        alphas = [judged["alpha"][name]["mean"] for name in ("1.0", "0.5", "0.1")]
        assert alphas[0] == pytest.approx(known.alpha, abs=1e-5)
        assert alphas == sorted(alphas) and alphas[0] < alphas[-1]
        assert judged["survival"] == pytest.approx(known.survival, abs=1e-4)
        assert judged["tokens"] == sum(map(sum, known.tokens))
        assert judged["alpha"]["1.0"]["error"] > 0
    moments = reproduce_laws.entropy(writings[1])
    assert moments["log_moment"] > moments["entropy"] ** 2 > 0


@pytest.mark.slow
def test_counts_are_of_other_lines_or_of_a_file(written):
    task, target, writings = written
    texts = [text for own in writings for text in own.texts]
    for kind in reproduce_laws.COUNTED:
        laws = reproduce_laws.counted_laws(task, target, writings[1], texts, kind)
        others = [own.tokens for own in texts if own.line != 0]
        made = tables.count_tables(others, target.model.vocab_size)
        drafter = made.unigram if kind == "unigram" else made
        text = writings[1].texts[0]
        last = jnp.asarray([0, *text.tokens[:-1]], jnp.int32)
        expected = np.array(drafter.probs(last), np.float64)
        expected[:, target.num_tokens :] = 0
        expected /= expected.sum(-1, keepdims=True)
        np.testing.assert_allclose(laws[0], expected, atol=1e-6)
    # Counts of the texts themselves know them better.
    task = dataclasses.replace(task, counts=[own.tokens for own in texts])
    known = reproduce_laws.counted_laws(task, target, writings[1], texts, kind)
    alphas = [
        reproduce_laws.judge(writings[1], own, (1.0,), 1)["alpha"]["1.0"]["mean"]
        for own in (laws, known)
    ]
    assert alphas[0] < alphas[1]
    # So does what experiments.count has left beside the target.
    task = dataclasses.replace(task, counts=None)
    assert task.stored(kind) == ""
    folder = target.folder.parent / kind
    made = tables.count_tables([own.tokens for own in texts], target.model.vocab_size)
    files.save_drafter(made, folder, t5_weights.fingerprint(target.folder))
    try:
        assert task.stored(kind) == str(folder)
        again = reproduce_laws.counted_laws(task, target, writings[1], texts, kind)
        assert task.weights() != task.weights(stored=str(folder))
    finally:
        shutil.rmtree(folder)
    for own, other in zip(again, known, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


@pytest.mark.slow
def test_every_cell_is_made_once(config, tmp_path, monkeypatch):
    assert reproduce.main(config, tmp_path, Flags()) == 0
    found = read(tmp_path)
    rows = found["times"]
    assert [(row["temperature"], row["draft"]) for row in rows] == [
        (temperature, draft) for temperature in (0, 1) for draft in ("shipped", "self")
    ]
    for row in rows:
        assert row["speedup"] > 0 and row["counted"] > 0 and row["gamma"] == 2
        assert row["calls"] <= row["tokens"] <= 3 * row["calls"]
        assert row["lost_to_cut"] == pytest.approx(
            1 - row["tokens"] / (row["calls"] + row["accepted"])
        )
        units = row["lines"] * row["encode"], row["lines"] * row["draft_encode"]
        rounds = row["calls"] * (2 * row["c"] + row["v"])
        whole = (units[0] + row["plain_tokens"]) / (sum(units) + rounds)
        assert row["counted"] == pytest.approx(
            whole * row["tokens"] / row["plain_tokens"]
        )
        assert row["mismatches"] == []
    own = rows[1]
    assert own["alpha"] == pytest.approx(1) and own["accepted"] == own["drafted"]
    assert {row["temperature"] for row in found["baselines"]} == {0, 1}
    assert all(row["slower_if_recomputed"] > 0 for row in found["baselines"])
    assert all(row["recomputed_mismatches"] == [] for row in found["baselines"])
    (decode,) = found["decodes"]
    assert {kind for _, kind, *_ in decode["tokens"]} <= {
        "accepted",
        "corrected",
        "bonus",
    }
    assert all(hover.startswith("target call ") for *_, hover in decode["tokens"])
    names = [lane["name"] for lane in found["timeline"]["lanes"]]
    assert names == ["gamma 2", "target alone"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6 and "A baseline that projects" in page
    kept = (tmp_path / "cells.jsonl").read_text()

    def refuse(*arguments, **settings):
        raise AssertionError("it was made before")

    for module, name in (
        (reproduce_times, "run"),
        (reproduce_times, "lanes"),
        (reproduce_times, "traced"),
        (reproduce_laws, "write"),
    ):
        monkeypatch.setattr(module, name, refuse)
    # A part shows what is known of the others, and makes nothing of them.
    assert reproduce.main(config, tmp_path, Flags("table1")) == 0
    assert read(tmp_path) == found and (tmp_path / "cells.jsonl").read_text() == kept
    assert reproduce.main(config, tmp_path, Flags()) == 0
    assert read(tmp_path)["failed"] == []
    config.seed = 1
    with pytest.raises(InputError, match="other settings, weights or lines"):
        reproduce.main(config, tmp_path, Flags())


@pytest.mark.slow
def test_a_cell_that_fails_leaves_the_others(config, tmp_path, monkeypatch):
    own = reproduce_times.prepare

    def prepare(group, pair, gamma):
        if pair.draft_model.config.num_decoder_layers == 2:  # the one that is its own
            raise RuntimeError("out of memory")
        return own(group, pair, gamma)

    monkeypatch.setattr(reproduce_times, "prepare", prepare)
    monkeypatch.setattr(reproduce_cells, "TEMPERATURES", (0,))
    with pairs.costs_are():
        assert reproduce.main(config, tmp_path, Flags("table2")) == 1
        found = read(tmp_path)
        assert [row["draft"] for row in found["times"]] == ["shipped"]
        (line,) = found["failed"]
        assert "draft self" in line and "RuntimeError: out of memory" in line
        assert "out of memory" in (tmp_path / "report.md").read_text()
        # What lacks is tried again, and the rest kept.
        before = found["times"]
        monkeypatch.setattr(reproduce_times, "prepare", own)
        assert reproduce.main(config, tmp_path, Flags("table2")) == 0
    found = read(tmp_path)
    assert [row["draft"] for row in found["times"]] == ["shipped", "self"]
    assert found["times"][0] == before[0] and found["failed"] == []


@pytest.mark.slow
def test_a_wider_draft_has_the_laws_of_its_own(config):
    """Widening keeps the function: one cell of laws serves both costs."""
    with config.unlocked():
        config.draft_cost.self.checkpoint = ""
        config.draft_cost.self.widen = "t5-v1_1-small"
    task = reproduce_tasks.Task.read(config, "tiny")
    target = build.load_target(task.decode_config())
    writings = reproduce_laws.write(task, target, 0)
    found = [
        reproduce_laws.judge(
            writings,
            writings.model(build.build_pair(task.decode_config(draft=name), target)),
            (1.0,),
            3,
        )
        for name in ("shipped", "self")
    ]
    assert found[0]["alpha"]["1.0"]["mean"] == found[1]["alpha"]["1.0"]["mean"]
    assert 0.2 < found[0]["alpha"]["1.0"]["mean"] < 1


KEEPS = """
import sys, jax, jax.numpy as jnp
from experiments import reproduce
jax.jit(lambda x: x + 1)(jnp.ones(3))  # jax has compiled before
with reproduce.compile_cache(__import__("pathlib").Path(sys.argv[1])):
    # Else programs that compile within a second are not kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((9, 9)))
assert jax.config.jax_compilation_cache_dir is None
"""


@pytest.mark.slow
def test_programs_are_kept_in_the_run_s_folder(tmp_path):
    """Unless jax has a place for them already."""
    hidden = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["PYTHONPATH"] = str(pairs.ROOT)
    run = [sys.executable, "-c", KEEPS, str(tmp_path)]
    subprocess.run(run, env=environment, check=True)
    assert list((tmp_path / "compiled").glob("jit*"))
