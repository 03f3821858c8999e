"""`experiments.benchmark` times a tiny shape beside the bytes of its step."""

import dataclasses
import math

import pytest

from experiments import benchmark
from specjax import roofline
from specjax.metrics import Timing, time_calls
from specjax.models import t5_config
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "bench.py"
TINY = dataclasses.replace(pairs.SHAPE, num_encoder_layers=1, num_decoder_layers=1)


def run_benchmark(workdir, *settings) -> pairs.Run:
    flags = (f"--config={CONFIG}", f"--workdir={workdir}", "--config.model=t5-tiny")
    return pairs.run(benchmark.main, workdir, *flags, *settings)


@pytest.fixture
def tiny_preset(monkeypatch):
    monkeypatch.setitem(t5_config._PRESETS, "t5-tiny", TINY)


def test_tiny_shape_from_flags_to_files(tiny_preset, tmp_path):
    with pairs.quick_costs():
        run = run_benchmark(
            tmp_path,
            "--config.fed=4",
            "--config.max_length=24",
            "--config.source_length=32",
            "--config.repeats=2",
        )
    assert run.code == 0, run.err
    metrics = run.metrics
    streamed = 4 * roofline.decoder_parameters(TINY)
    assert metrics["streamed_bytes"] == streamed
    assert metrics["limit_seconds"] == pytest.approx(streamed / metrics["bandwidth"])
    assert set(metrics["passes"]) == {"4"}
    timings = [metrics["step"], *metrics["passes"].values(), metrics["encode"]]
    for timing in timings:
        assert all(math.isfinite(value) and value > 0 for value in timing.values())
        low, high = timing["first_quartile"], timing["third_quartile"]
        assert low <= timing["seconds"] <= high
    step, four = metrics["step"], metrics["passes"]["4"]
    assert four["over_limit"] == pytest.approx(four["steps"] * step["over_limit"])
    assert metrics["parameter_bytes"] == 4 * t5_config.num_parameters(TINY)
    assert metrics["peak_memory_bytes"] > metrics["parameter_bytes"]
    assert "limit: weights read once" in run.out and "4 tokens" in run.out
    assert run.read("manifest.json")["config"]["model"] == "t5-tiny"


SETTINGS = {
    "model=t5-bsae": "There is no T5 preset 't5-bsae'",
    "dtype=int8": "config.dtype is 'int8'",
    "fed=0": "config.fed is",
    "fed=64": "config.fed is",
    "repeats=0": "config.repeats is 0",
    "seed=-1": "config.seed is -1",
    "max_length=1": "config.max_length is 1",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bad_settings(tiny_preset, tmp_path, monkeypatch, setting):
    monkeypatch.setattr(benchmark, "random_model", None)
    workdir = tmp_path / "new"
    flags = (f"--config={CONFIG}", f"--workdir={workdir}", f"--config.{setting}")
    run = pairs.run(benchmark.main, workdir, *flags)
    assert run.code == 2 and SETTINGS[setting] in run.err, run.err
    assert run.err.count("\n") == 1 and not workdir.exists()


def test_ratios_are_taken_within_rounds():
    """A slow second round doubles both, and changes no ratio."""
    streaming = benchmark.Streaming(
        read=Timing((1.0, 2.0, 1.0)), step=Timing((1.5, 3.0, 1.2))
    )
    assert streaming.over_limit == 1.5


def test_reading_takes_longer_the_more_is_read():
    few, many = benchmark.reader(4_000_000), benchmark.reader(400_000_000)
    timings = time_calls({"few": few, "many": many}, repeats=3)
    assert timings["many"].median > 5 * timings["few"].median
    assert 1e8 < 4e8 / timings["many"].median < 1e13  # bytes per second
