"""`experiments.plan` says what fits before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest

from experiments import plan
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "plan.py"


def run(workdir, *settings):
    flags = (f"--config={CONFIG}", f"--workdir={workdir}", *settings)
    return pairs.run(plan.main, workdir, *flags)


def test_xxl_on_four_kinds_of_device(tmp_path):
    made = run(tmp_path)
    assert made.code == 0, made.err
    rows = {row["place"]: row for row in made.read("metrics.json")["rows"]}
    assert {name for name, row in rows.items() if row["fits"]} == {
        *("v4", "v5e", "h200", "a100")
    }
    assert rows["v5e"]["total"] < rows["v4"]["total"] / 3.5
    table = (tmp_path / "plan.md").read_text()
    assert "| TPU v5e | model=4 |" in table and "target weights" in table


def test_what_does_not_fit_says_so(tmp_path):
    made = run(
        tmp_path,
        "--config.place.v5e.mesh=model=1",
        "--config.place.a100.mesh=model=1",
        "--config.dtype=float32",
    )
    rows = {row["place"]: row for row in made.read("metrics.json")["rows"]}
    assert not rows["v5e"]["fits"] and not rows["a100"]["fits"]
    assert rows["h200"]["fits"] and made.code == 0


def test_a_folder_is_a_shape_too(tmp_path):
    made = run(
        tmp_path, "--config.target=zoo/repair/target", "--config.draft=zoo/repair/draft"
    )
    assert made.code == 0, made.err


@pytest.mark.parametrize(
    "setting, message",
    [
        ("target=t5-huge", "config.target is 't5-huge', which is no folder"),
        ("place.v5e.mesh=model=3", "config.place.v5e: the mesh's model=3 does not"),
        ("place.v5e.device=TPU v1", "config.place.v5e: device is 'TPU v1'"),
        ("place.v5e.mesh=pipe=4", "config.place.v5e: mesh is 'pipe=4'"),
        ("batch_size=0", "batch is 0"),
    ],
)
def test_settings_that_mean_nothing(tmp_path, setting, message):
    made = run(tmp_path, f"--config.{setting}")
    assert made.code == 2 and message in made.err, made.err
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu"
)
def test_the_compiler_counts_within_a_tenth(tmp_path):
    made = run(tmp_path, "--config.compile=True", "--config.target=t5-v1_1-large")
    rows = [row for row in made.read("metrics.json")["rows"] if "compiler" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["total"] == pytest.approx(row["compiler"], rel=0.1)
        # Sums of a hidden state, and a number of each device: on several alone.
        assert bool(row["exchanges"]) == (row["mesh"] == "model=4")
