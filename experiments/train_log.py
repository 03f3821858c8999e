"""What a training run says of itself: a JSONL, TensorBoard's files, a progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np

from specjax import errors

Line = dict[str, float]
Writer = Callable[[Line], None]
# Of a step's metrics these are averaged over the steps of a line.
_AVERAGED = (
    *("loss", "nll", "z_loss", "exit_loss", "grad_norm"),
    *("alpha", "expected_length"),
)


@contextlib.contextmanager
def open_log(
    workdir: pathlib.Path, total: int, done: int, *, tensorboard: bool = False
) -> Iterator[Writer]:
    """A function that takes a line of a run to all places at once.

    What a killed run has written of steps after `done` is dropped, so that no step
    stands twice. A disk without room does not end the run: it is said once, and what
    waits is written when there is room.

    Args:
        workdir: receives `train.jsonl` and `tensorboard/`.
        total: steps of the run.
        done: steps that were taken before.
        tensorboard: whether TensorBoard's files are written too.

    Yields:
        ``write(line)``; a line is numbers by name, its ``step`` among them.
    """
    path = workdir / "train.jsonl"
    _drop_after(path, done)
    with contextlib.ExitStack() as stack:
        # A buffer keeps what could not be written, and goes on where it stopped.
        file = open(path, "ab", buffering=2**20)
        stack.callback(_close, file)
        writers = [_jsonl(file)]
        if tensorboard:
            events = _events_file(workdir / "tensorboard", done)
            stack.callback(_close, events)
            writers.append(_tensorboard(events, done))
        show = stack.enter_context(_progress(total, done))
        failing = set()

        def write(line: Line) -> None:
            for writer in writers:
                try:
                    writer(line)
                    failing.discard(writer)
                except OSError as error:
                    if writer not in failing:
                        warnings.warn(f"the log waits: {error}", stacklevel=2)
                    failing.add(writer)
            show(line)

        yield write


def last_evaluation(workdir: pathlib.Path) -> Line:
    """The last line of scores that a run has logged; empty: there is none."""
    scores = [line for line in read_lines(workdir) if "loss" not in line]
    return scores[-1] if scores else {}


def read_lines(workdir: pathlib.Path) -> list[Line]:
    """The lines of a run's log, but for one that was cut short; none: []."""
    path = workdir / "train.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [own for own in found if isinstance(own, dict) and "step" in own]


def minutes(lines: Sequence[Line]) -> float:
    """What all steps of a run took together, evaluations apart.

    Args:
        lines: of its log.
    """
    total, before = 0.0, 0.0
    for line in lines:
        total += (line["step"] - before) * line.get("seconds_per_step", 0.0) / 60
        before = line["step"]
    return total


def starts(workdir: pathlib.Path, first: int) -> list[dict[str, Any]]:
    """How the run was begun, and gone on with: step and command of each time.

    Args:
        workdir: of the run; an earlier start has left its manifest there.
        first: the step before the first one that is taken now.
    """
    before: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = (workdir / "manifest.json").read_text(encoding="utf-8")
        before = json.loads(text)["effective"]["starts"]
    # What a later start has gone back behind is no part of these weights.
    kept = [own for own in before if own["step"] < first]
    return [*kept, {"step": first, "command": shlex.join(sys.argv)}]


def averages(
    number: int,
    recent: Sequence[dict[str, jax.Array]],
    seconds: float,
    flops: int,
    peak: float | None,
) -> Line:
    """The line of some steps.

    Args:
        number: of the last step.
        recent: what each step returned.
        seconds: that they took.
        flops: operations of all their products.
        peak: operations a second that the machine can do; None: not measured.

    Returns:
        Means, the last learning rate, and the speed; with a peak also the share of it
        that the products came to, ``matmul_share``.
    """
    means = {
        name: float(np.mean([metrics[name] for metrics in recent]))
        for name in _AVERAGED
        if name in recent[0]
    }
    tokens = float(sum(metrics["tokens"] for metrics in recent))
    speed = {
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds / len(recent),
    }
    if peak is not None:
        speed["matmul_share"] = flops / seconds / peak
    rate = {"learning_rate": float(recent[-1]["learning_rate"])}
    return {"step": number, **means, **rate, **speed}


def check_tensorboard() -> None:
    """Raises InputError where TensorBoard's files cannot be written."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise errors.InputError(
            f"config.tensorboard is set and {error.name} is not installed: pip install "
            "'specjax[data]' brings it"
        ) from error


def _drop_after(path: pathlib.Path, number: int) -> None:
    """Drops lines of steps that a killed run took after its last checkpoint."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= number:
                kept.append(line + "\n")
    # In one piece: killed here, the run must not lose what stood there.
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


def _close(file: Any) -> None:
    try:
        file.close()
    except OSError as error:
        warnings.warn(f"the end of the log is lost: {error}", stacklevel=2)


def _jsonl(file: BinaryIO) -> Writer:
    def write(line: Line) -> None:
        file.write((json.dumps(line) + "\n").encode())
        file.flush()

    return write


def _events_file(folder: pathlib.Path, done: int) -> Any:
    from tensorboardX.event_file_writer import EventsWriter

    folder.mkdir(parents=True, exist_ok=True)
    # Its name holds no more of the time than the second.
    return EventsWriter(str(folder / "events"), f".{done}.{os.getpid()}")


def _tensorboard(events: Any, done: int) -> Writer:
    """Writes in this thread: tensorboardX's own waits for ever on a disk that is full.

    TensorBoard drops what earlier files hold of the step that a session starts with,
    and of later ones.
    """
    from tensorboardX.proto import event_pb2, summary_pb2

    def write_event(**fields: Any) -> None:
        events.write_event(event_pb2.Event(wall_time=time.time(), **fields))
        events.flush()

    def write(line: Line) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in line.items()
            if name != "step"
        ]
        write_event(step=int(line["step"]), summary=summary_pb2.Summary(value=values))

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    write_event(step=done + 1, session_log=start)
    return write


def _describe(line: Line) -> str:
    shown = (f"{name} {value:.4g}" for name, value in line.items() if name != "step")
    return f"step {line['step']}: " + "  ".join(shown)


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Writer]:
    """A progress bar on a terminal, a line per report elsewhere."""
    if not sys.stdout.isatty():
        yield lambda line: print(_describe(line), flush=True)
        return
    from rich import progress

    with progress.Progress(
        *progress.Progress.get_default_columns(),
        progress.TimeElapsedColumn(),
        progress.MofNCompleteColumn(),
    ) as bar:
        task = bar.add_task("training", total=total, completed=done)

        def advance(line: Line) -> None:
            bar.update(task, completed=line["step"])
            if "loss" not in line or line["step"] % 100 == 0:
                bar.console.print(_describe(line))

        yield advance
