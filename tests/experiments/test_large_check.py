"""`experiments.large_check` goes from shards to tokens, and sees what is amiss."""

from __future__ import annotations

import copy

import pytest

from experiments import large_check
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "large_check.py"
GOOD = {
    "weights": 10_000_000_000,
    "largest_parameter": 200_000_000,
    "phases": {
        name: {"seconds": 1.0, "peak": 10_900_000_000}
        for name in ("write", "read", "plain", "drafted")
    },
    "differences": [],
}


def run(workdir, *settings):
    flags = (f"--config={CONFIG}", f"--workdir={workdir}", *settings)
    return pairs.run(large_check.main, workdir, *flags)


@pytest.mark.slow
def test_from_shards_to_tokens(tmp_path):
    settings = (
        *("--config.target=t5-v1_1-small", "--config.draft=t5-v1_1-small"),
        *("--config.shard_bytes=50000000", "--config.max_length=5"),
    )
    made = run(tmp_path, *settings)
    assert made.code == 0, made.err + made.out
    assert len([*(tmp_path / "target").glob("model-*.safetensors")]) >= 3
    result = made.read("metrics.json")
    assert result["phases"]["read"]["peak"] > 0 and len(result["tokens"][0]) == 5
    # The files stand, and are not written again.
    before = (tmp_path / "target" / "config.json").stat().st_mtime_ns
    assert run(tmp_path, *settings).code == 0
    assert (tmp_path / "target" / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "place, value, fault",
    [
        (("read", "peak"), 11_300_000_000, "reading took 11.30 GB: at most 11.20 GB"),
        (("plain", "peak"), 30_000_000_000, "decoding (plain) took 30.00 GB: another"),
        (("drafted", "peak"), 30_000_000_000, "decoding (drafted) took 30.00 GB"),
    ],
)
def test_too_much_memory_is_a_fault(place, value, fault):
    assert large_check.judge(GOOD, "bfloat16") == []
    result = copy.deepcopy(GOOD)
    result["phases"][place[0]][place[1]] = value
    (found,) = large_check.judge(result, "bfloat16")
    assert found.startswith(fault)


def test_other_tokens_are_a_fault_unless_tied():
    apart = [{"row": 0, "position": 3, "gap": 0.6}, {"row": 0, "position": 4, "gap": 0}]
    (found,) = large_check.judge(GOOD | {"differences": apart}, "bfloat16")
    assert found.startswith("the outputs part at position 3")


@pytest.mark.parametrize(
    "setting, message",
    [
        ("target=t5-giant", "config.target: "),
        ("gamma=0", "config.gamma is 0"),
        ("mesh=data=3", "takes 3 devices"),
    ],
)
def test_settings_that_mean_nothing(tmp_path, setting, message):
    made = run(tmp_path / "new", f"--config.{setting}")
    assert made.code == 2 and message in made.err
    assert not (tmp_path / "new").exists()
