"""The log of a run: each step once, whatever happened, and a disk that is full."""

import contextlib
import errno
import json
import os
import pathlib
import struct

import numpy as np
import pytest

from experiments import train_log

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(workdir: pathlib.Path, done: int, *steps: int, tensorboard=False) -> None:
    log = train_log.open_log(workdir, 9, done, tensorboard=tensorboard)
    with log as line:
        for step in steps:
            line({"step": step, "loss": step / 4})


def logged(workdir: pathlib.Path) -> list[dict]:
    return list(map(json.loads, (workdir / "train.jsonl").read_text().splitlines()))


def test_each_step_stands_once(tmp_path, capsys):
    write(tmp_path, 0, 1, 2, 3, 4)
    path = tmp_path / "train.jsonl"
    # Half a line, as a kill leaves it.
    path.write_text(path.read_text() + '{"step": 2, "lo')
    write(tmp_path, 2, 3, 5)
    assert [own["step"] for own in logged(tmp_path)] == [1, 2, 3, 5]
    assert "step 3: loss 0.75\n" in capsys.readouterr().out


def events(folder: pathlib.Path) -> list[list]:
    """Of each file in the order of its making, by TFRecord's own layout."""
    from tensorboardX.proto import event_pb2

    files = []
    for path in sorted(folder.iterdir(), key=lambda own: own.stat().st_mtime_ns):
        content, at, found = path.read_bytes(), 0, []
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(
                event_pb2.Event.FromString(content[at + 12 : at + 12 + length])
            )
            at += length + 16
        files.append(found)
    return files


def test_tensorboard_shows_each_step_once(tmp_path):
    """After TensorBoard has dropped what a new session tells it to."""
    pytest.importorskip("tensorboardX")
    write(tmp_path, 0, 1, 2, 3, 4, tensorboard=True)
    write(tmp_path, 2, 3, 5, tensorboard=True)
    first, second = events(tmp_path / "tensorboard")
    shown: list[tuple[int, float]] = []
    for event in [*first, *second]:
        if event.HasField("session_log"):
            assert event.session_log.status == event.session_log.START
            shown = [own for own in shown if own[0] < event.step]
        for value in event.summary.value:
            assert value.tag == "loss"
            shown.append((event.step, value.simple_value))
    assert shown == [(1, 0.25), (2, 0.5), (3, 0.75), (5, 1.25)]
    assert first[0].file_version == "brain.Event:2"


class FullFile:
    """Fails while it is told to."""

    def __init__(self, file):
        self.file, self.full = file, False

    def write(self, content):
        self.file.write(content)

    def flush(self):
        if self.full:
            raise FULL
        self.file.flush()

    def close(self):
        self.file.close()
        if self.full:
            raise FULL


def test_a_full_disk_is_said_once_and_nothing_is_lost(tmp_path, monkeypatch):
    made = []

    def open_full(*arguments, **settings):
        made.append(FullFile(open(*arguments, **settings)))
        return made[-1]

    monkeypatch.setattr(train_log, "open", open_full, raising=False)
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(train_log.open_log(tmp_path, 9, 0))
        line({"step": 1})
        made[0].full = True
        with pytest.warns(UserWarning, match="the log waits: .*No space left") as seen:
            line({"step": 2})
            line({"step": 3})
        assert len(seen) == 1
        made[0].full = False
        line({"step": 4})
        assert [own["step"] for own in logged(tmp_path)] == [1, 2, 3, 4]
        made[0].full = True
        with pytest.warns(UserWarning, match="the log waits"):
            line({"step": 5})
        with pytest.warns(UserWarning, match="the end of the log is lost"):
            stack.close()


def test_averages():
    recent = [
        {"loss": np.float32(1), "tokens": np.float32(30), "learning_rate": 0.1},
        {"loss": np.float32(3), "tokens": np.float32(10), "learning_rate": 0.2},
    ]
    assert train_log.averages(7, recent, 4.0, 800, 1000.0) == {
        "step": 7,
        "loss": 2.0,
        "learning_rate": 0.2,
        "tokens_per_second": 10.0,
        "seconds_per_step": 2.0,
        "matmul_share": 0.2,
    }
    assert "matmul_share" not in train_log.averages(7, recent, 4.0, 800, None)
