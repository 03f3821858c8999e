"""`experiments.generate` on a mesh, and in several processes, of which some die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from experiments import generate
from specjax.data import pairs as text_pairs
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "repair_generate.py"
SAMPLED = "--config.sampling.temperature=1.0"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources") / "train.jsonl"
    lines = [text_pairs.Pair(line, line.upper()) for line in pairs.LINES]
    text_pairs.save_pairs(path, lines)
    return path


def arguments(folders, sources, workdir, *settings):
    return (
        f"--config={CONFIG}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.batch_size=4",
        "--config.chunk=4",
        f"--input={sources}",
        f"--workdir={workdir}",
        *settings,
    )


def drafting(folders, *settings):
    draft = f"--config.draft.checkpoint={folders.draft}"
    return ("--config.drafter=model", draft, "--config.gamma=3", *settings)


def run(folders, sources, workdir, *settings):
    flags = arguments(folders, sources, workdir, *settings)
    return pairs.run(generate.main, workdir, *flags, define=generate._define)


@pytest.fixture(scope="module")
def alone(folders, sources, tmp_path_factory):
    """What one device writes: with a draft, drawn at temperature 1."""
    workdir = tmp_path_factory.mktemp("alone")
    made = run(folders, sources, workdir, *drafting(folders, SAMPLED))
    assert made.code == 0, made.err
    return (workdir / "generated.jsonl").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        ["--config.mesh=data=2,model=4"],
        ["--config.mesh=data=4,model=2", "--config.draft.split=True"],
    ],
    ids=["whole draft", "split draft"],
)
def test_a_mesh_writes_the_same_lines(folders, sources, alone, tmp_path, settings):
    made = run(folders, sources, tmp_path, *drafting(folders, SAMPLED, *settings))
    assert made.code == 0, made.err
    assert (tmp_path / "generated.jsonl").read_bytes() == alone


def test_greedily_a_draft_changes_nothing(folders, sources, tmp_path):
    written = []
    for name, settings in (("plain", ()), ("drafted", drafting(folders))):
        made = run(folders, sources, tmp_path / name, *settings)
        assert made.code == 0, made.err
        written.append((tmp_path / name / "generated.jsonl").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "settings, message",
    [
        (["--config.mesh=data=3"], "takes 3 devices, and there are 8"),
        (["--config.mesh=data=8"], "config.batch_size is 4 and the mesh's data is 8"),
        (["--config.mesh=model=8"], "the 4 attention heads of the target: take one of"),
        (["--config.draft.checkpoint=zoo/repair/draft"], "config.drafter is empty"),
        (["--config.distributed.processes=2"], "distributed.coordinator is empty"),
        (["--config.distributed.coordinator=h:1"], "needs its processes"),
        (
            [
                "--config.distributed.coordinator=h:1",
                "--config.distributed.processes=2",
                "--config.distributed.process=2",
            ],
            "config.distributed.process is 2 and there are 2: 0 to 1",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    folders, sources, tmp_path, settings, message
):
    made = run(folders, sources, tmp_path, *settings)
    assert made.code == 2 and message in made.err, made.err
    assert not (tmp_path / "generated.jsonl").exists()


@pytest.mark.slow
def test_the_decoding_command_on_a_mesh(folders, decoded, tmp_path):
    settings = ("--config.mesh=data=2,model=4", "--config.batch_size=2")
    with pairs.costs_are():
        made = pairs.run_decode(folders, tmp_path, *settings)
    assert made.code == 0, made.err
    for own, known in zip(made.decodes, decoded.decodes, strict=True):
        assert own["tokens"] == known["tokens"]


def test_a_split_draft_needs_a_mesh(folders, sources, tmp_path):
    settings = drafting(folders, "--config.draft.split=True")
    made = run(folders, sources, tmp_path, *settings)
    assert made.code == 2 and "there is no mesh to split the draft over" in made.err


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def start(folders, sources, workdir, process, port, *settings, timeout=20):
    """One of two processes, with two devices each."""
    flags = (
        f"--config.distributed.coordinator=127.0.0.1:{port}",
        "--config.distributed.processes=2",
        f"--config.distributed.process={process}",
        f"--config.distributed.timeout={timeout}",
        *settings,
    )
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "experiments.generate"),
            *arguments(folders, sources, workdir, *drafting(folders, SAMPLED), *flags),
        ],
        cwd=pairs.ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_write_the_same_lines(folders, sources, alone, tmp_path):
    port = free_port()
    both = [
        start(folders, sources, tmp_path, n, port, "--config.mesh=data=2,model=2")
        for n in range(2)
    ]
    ended = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], ended
    assert (tmp_path / "generated.jsonl").read_bytes() == alone
    assert "written" in ended[0][0] and "written" not in ended[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_one_that_dies_ends_the_other_and_loses_no_line(
    folders, sources, alone, tmp_path, dying
):
    many = tmp_path / "many.jsonl"
    lines = text_pairs.load_pairs(sources)
    text_pairs.save_pairs(many, lines * 200)
    workdir, port = tmp_path / "out", free_port()
    both = [
        start(folders, many, workdir, n, port, "--config.mesh=data=2,model=2")
        for n in range(2)
    ]
    path = workdir / "generated.jsonl"
    give_up = time.monotonic() + 240
    while not path.exists() or path.stat().st_size == 0:
        assert time.monotonic() < give_up and both[1].poll() is None
        time.sleep(0.1)
    both[dying].kill()
    other = both[1 - dying]
    began = time.monotonic()
    out, err = other.communicate(timeout=120)
    took = time.monotonic() - began
    both[dying].communicate()
    assert other.returncode != 0 and took < 60
    assert "another process has ended" in err, err
    kept = path.read_bytes()
    assert kept.count(b"\n") >= 4
    # One device goes on where two processes stopped: the same run.
    limit = kept.count(b"\n") // 7 * 7 + 7
    made = run(
        folders, many, workdir, *drafting(folders, SAMPLED), f"--config.limit={limit}"
    )
    assert made.code == 0, made.err
    whole = path.read_bytes()
    assert whole.startswith(kept[: kept.rfind(b"\n") + 1])
    assert whole.splitlines()[:7] == alone.splitlines()


@pytest.mark.slow
def test_one_that_never_comes(folders, sources, tmp_path):
    own = start(folders, sources, tmp_path, 0, free_port(), timeout=5)
    began = time.monotonic()
    out, err = own.communicate(timeout=120)
    assert own.returncode == 2 and time.monotonic() - began < 60
    assert "the processes did not come together within 5 s" in err, err
