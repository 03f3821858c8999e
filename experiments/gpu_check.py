"""What a GPU does with a T5-XXL and its drafts, in at most eight minutes.

    python -m experiments.gpu_check --out=gpu_check.json [--shape=full|tiny]
        [--seconds=440] [--stages=bandwidth,target,...]

Stages, in order of worth: `bandwidth` of a copy; `target`: steps and verifying passes
of 4 and 8 tokens; `drafts`: their steps, as loops and as straight-line code; `batch_1`:
whole decodes with 5 and 7 drafted tokens, greedy and at temperature 1; `launches`: the
smallest draft under several settings of XLA's command buffers, each in a process of its
own; `batches` of 4 and 16. All goes into one JSON file, written anew whenever something
is known; what the time does not allow is left out and said. Stages up to `drafts`, and
`launches`, need jax alone; whole decodes are specjax's own, which needs flax.

Weights are made up, on the device, an array at a time: nothing is read. Target and
drafts share a law of the last token, to which their layers add noise of their own, so
that drafts are accepted at a rate that is measured, and means nothing for text. The
decoder alone runs: keys and values of a source are made up too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu_decoder import (
    SLOTS,
    Shape,
    Weights,
    feed,
    make_cross,
    make_memory,
    make_weights,
    stacked,
)

Row = dict[str, Any]

_STEPS, _REPEATS = 32, 5  # passes of a call, and timed calls
_SPREAD = ("fastest", "slowest")
_STRAIGHT = 8  # passes written one after another
# XLA's settings; `while` crashed on its second run in some versions.
_FLAGS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "smallest": "--xla_gpu_graph_min_graph_size=1",
    "while": "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        name: of all this.
        target: its shape.
        drafts: shapes by name, the smallest first.
        core: columns of the embedding that all of them share.
        copied: bytes of the copy.
        length: of the output.
        batches: of whole decodes.
        gammas: of whole decodes.
    """

    name: str
    target: Shape
    drafts: dict[str, Shape]
    core: int
    copied: int
    length: int
    batches: tuple[int, ...] = (4, 16)
    gammas: tuple[int, ...] = (7, 5)


_SETUPS = (
    Setup(
        "full",
        target=Shape(4096, 64, 64, 10240, 24),
        drafts={
            "small": Shape(512, 6, 64, 1024, 8),
            "base": Shape(768, 12, 64, 2048, 12),
            "large": Shape(1024, 16, 64, 2816, 24),
        },
        core=512,
        copied=2**32,
        length=128,
    ),
    Setup(
        "tiny",
        target=Shape(32, 4, 8, 48, 2, vocab=64),
        drafts={"small": Shape(16, 2, 8, 24, 1, vocab=64)},
        core=16,
        copied=2**20,
        length=12,
        batches=(2,),
        gammas=(3,),
    ),
)
SETUPS = {setup.name: setup for setup in _SETUPS}


class OutOfTime(Exception):
    """The next program might not be done in time."""


class Report:
    """The JSON file, and the time.

    Args:
        path: of the file.
        seconds: from now on.
    """

    def __init__(self, path: pathlib.Path, seconds: float):
        self.content: Row = {"stages": {}}
        self._path, self._seconds = path, seconds
        self._start, self._longest = time.perf_counter(), 0.0

    def passed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start

    def room(self, needed: float = 0.0) -> float:
        """Seconds that are left.

        Raises:
            OutOfTime: fewer than `needed`, or than the longest program took.
        """
        left = self._seconds - self.passed()
        if left < max(needed, self._longest):
            raise OutOfTime
        return left

    def timed(self, call: Callable[[], Any], repeats: int = _REPEATS) -> Row:
        """Median seconds of a call, compile time apart; it runs twice at least."""
        self.room()
        start = time.perf_counter()
        jax.block_until_ready(call())
        first, times = time.perf_counter() - start, []
        self._longest = max(self._longest, first)
        for _ in range(max(repeats, 1)):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        return {
            "seconds": seconds,
            "fastest": min(times),
            "slowest": max(times),
            "compile_seconds": max(first - seconds, 0.0),
        }

    def write(self, stage: str, **found: Any) -> None:
        """Adds to a stage, and writes the file in one piece."""
        own = self.content["stages"].setdefault(stage, {})
        own |= found | {"at": round(self.passed(), 1)}
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._path)


def stepper(
    shape: Shape, weights: Weights, fed: int = 1, batch: int = 1, straight: int = 1
) -> tuple[Callable[[], Any], int]:
    """A call that makes passes one after another, each fed with the last one's ids.

    Args:
        shape: of the decoder.
        weights: its layers a tuple, or stacked.
        fed: tokens of a pass.
        batch: rows.
        straight: passes that are written one after another in the loop's body.

    Returns:
        the call, and how many passes it makes.
    """
    scanned = isinstance(weights["layers"], dict)
    cross = make_cross(shape, batch, scanned)
    rounds = max(_STEPS // straight, 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(memory: Any, weights: Weights, cross: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            tokens, memory = carry
            for _ in range(straight):
                length = jnp.full(batch, SLOTS // 2, jnp.int32)
                logits, memory = feed(shape, weights, memory, cross, tokens, length)
                tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return tokens, memory

        carry = (jnp.zeros((batch, fed), jnp.int32), memory)
        return jax.lax.fori_loop(0, rounds, body, carry)

    kept = [make_memory(shape, batch, SLOTS, scanned)]

    def call() -> Any:
        # Donated: the next call writes to the same memory.
        tokens, kept[0] = run(kept[0], weights, cross)
        return tokens

    return call, rounds * straight


def time_steps(
    report: Report, bandwidth: float | None, shape: Shape, weights: Weights, **how: int
) -> Row:
    """Times a `stepper`: a pass beside what reading its bytes takes."""
    call, passes = stepper(shape, weights, **how)
    found = report.timed(call)
    step = found["seconds"] / passes
    times = {"ms": 1e3 * step}
    if bandwidth:
        bound = shape.bytes(how.get("batch", 1)) / bandwidth
        times |= {"bytes_ms": 1e3 * bound, "of_bound": step / bound}
    spread = {f"{name}_ms": 1e3 * found[name] / passes for name in _SPREAD}
    return times | spread | {"compile_seconds": found["compile_seconds"]}


class Run:
    """All stages, with what later ones take from earlier ones.

    Args:
        setup: what is measured.
        report: where it goes.
    """

    def __init__(self, setup: Setup, report: Report):
        self.setup, self.report = setup, report
        self._weights: dict[tuple[str, bool], Row] = {}
        self._target_scanned = True

    def stage(self, name: str) -> None:
        """Runs one stage; what goes wrong in it is written down."""
        try:
            self.report.room()
            getattr(self, name)()
            self.report.write(name, done=True)
        except OutOfTime:
            self.report.write(name, done=False, stopped="the time limit")
        except Exception as error:  # the stages after it still have their worth
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self.report.write(name, done=False, stopped=why)

    def weights(self, name: str, scanned: bool) -> Row:
        """Of the target or a draft, in one of the two forms."""
        if (name, scanned) not in self._weights:
            if scanned:
                made = stacked(self.weights(name, False))
            else:
                names = ("target", *self.setup.drafts)
                shape = self._shape(name)
                made = make_weights(shape, self.setup.core, names.index(name))
            self._weights[name, scanned] = jax.block_until_ready(made)
        return self._weights[name, scanned]

    def bandwidth(self) -> None:
        """Of a copy: bytes read and written."""
        array = jnp.zeros(self.setup.copied // 4, jnp.float32)
        copy = jax.jit(lambda x: x + 1)
        found = self.report.timed(lambda: copy(array), 20)
        found["bytes_per_second"] = 2 * array.nbytes / found["seconds"]
        self.report.write("bandwidth", **found)

    def target(self) -> None:
        """A step with layers scanned and written out; passes of 4 and 8 tokens."""
        for form, scanned in (("scanned", True), ("written_out", False)):
            step = self._steps("target", scanned)
            self.report.write("target", **{form: step})
        found = self.report.content["stages"]["target"]
        self._target_scanned = found["scanned"]["ms"] <= found["written_out"]["ms"]
        self._weights.pop(("target", not self._target_scanned))  # no longer needed
        best = "scanned" if self._target_scanned else "written_out"
        step = found[best]["ms"]
        self.report.write("target", form=best, step=found[best])
        for fed in (4, 8):
            passed = self._steps("target", self._target_scanned, fed=fed)
            passed["v"] = passed["ms"] / step
            self.report.write("target", **{f"verify_{fed}": passed})

    def drafts(self) -> None:
        """Steps of all drafts: loops of scans, and several steps as straight code."""
        step = self._found("target", "step", "ms")
        for name in self.setup.drafts:
            forms = {}
            for form, scanned, straight in (
                ("straight", False, _STRAIGHT),
                ("looped", True, 1),
            ):
                forms[form] = self._steps(name, scanned, straight=straight)
                forms[form]["c"] = forms[form]["ms"] / step if step else None
                self.report.write("drafts", **{name: forms})

    def batch_1(self) -> None:
        """Whole decodes of one row, by every gamma, greedy and drawn."""
        for temperature in (None, 1.0):
            for gamma in self.setup.gammas:
                self._decode("batch_1", 1, gamma, temperature)
        self._decode("batch_1", 1, self.setup.gammas[0], None, straight=True)

    def batches(self) -> None:
        """Whole greedy decodes of several rows with the smaller gamma."""
        for batch in self.setup.batches:
            self._decode("batches", batch, self.setup.gammas[-1], None)

    def launches(self) -> None:
        """The smallest draft's step under several settings of command buffers."""
        on_gpu = jax.default_backend() == "gpu"
        step = self._found("target", "step", "ms")
        for name, flags in _FLAGS.items() if on_gpu else [("default", "")]:
            found = self._child(flags, self.report.room(30.0))
            for form in ("looped", "straight"):
                if step and form in found:
                    found[form]["c"] = found[form]["ms"] / step
            self.report.write("launches", **{name: found})

    def _child(self, flags: str, seconds: float) -> Row:
        path = self.report._path.with_name("gpu_check_child.json")
        path.unlink(missing_ok=True)
        words = [sys.executable, "-m", "experiments.gpu_check", f"--out={path}"]
        words += [f"--shape={self.setup.name}", f"--seconds={seconds}"]
        words += ["--stages=drafts", "--first"]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        found: Row = {"flags": flags}
        try:
            run = subprocess.run(
                words,
                cwd=pathlib.Path(__file__).resolve().parent.parent,
                env=environment,
                timeout=seconds,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return found | {"failed": "it hung, or the time was up"}
        if path.exists():
            stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
            found |= stages.get("drafts", {}).get(next(iter(self.setup.drafts)), {})
            path.unlink()
        if run.returncode:
            tail = " ".join(run.stderr.split())[-300:]
            found["failed"] = f"exit code {run.returncode}: {tail}"
        return found

    def _decode(
        self,
        stage: str,
        batch: int,
        gamma: int,
        temperature: float | None,
        straight: bool = False,
    ) -> None:
        decodes = _decodes()
        name = next(iter(self.setup.drafts))
        scanned = {"target": self._target_scanned, name: not straight}
        models = [
            decodes.Decoder(
                shape=self._shape(own),
                weights=self.weights(own, form),
                cross=make_cross(self._shape(own), batch, form),
            )
            for own, form in scanned.items()
        ]
        found = decodes.compare(
            self.report,
            *models,
            batch=batch,
            gamma=gamma,
            temperature=temperature,
            length=self.setup.length,
            straight=straight,
        )
        form = "straight" if straight else "looped"
        c = self._found("drafts", name, form, "c")
        v = [self._found("target", f"verify_{fed}", "v") for fed in (4, 8)]
        if c and all(v) and batch == 1:
            near = v[0] + (gamma - 3) / 4 * (v[1] - v[0])
            found["predicted"] = found["tokens_per_call"] / (gamma * c + near)
        drawn = "greedy" if temperature is None else f"T={temperature:g}"
        words = f"batch {batch}, gamma {gamma}, {drawn}{', straight' * straight}"
        self.report.write(stage, **{words: found})

    def _shape(self, name: str) -> Shape:
        return self.setup.target if name == "target" else self.setup.drafts[name]

    def _steps(self, name: str, scanned: bool, **how: int) -> Row:
        bandwidth = self._found("bandwidth", "bytes_per_second")
        weights = self.weights(name, scanned)
        return time_steps(self.report, bandwidth, self._shape(name), weights, **how)

    def _found(self, *path: str) -> Any:
        own: Any = self.report.content["stages"]
        for name in path:
            own = own.get(name) if isinstance(own, dict) else None
        return own


def _decodes() -> Any:
    """What needs specjax.

    Raises:
        RuntimeError: it cannot be imported, in a sentence.
    """
    try:
        from experiments import gpu_decodes
    except Exception as error:
        versions = _versions()
        raise RuntimeError(
            f"whole decodes are specjax's, which cannot be imported with flax "
            f"{versions.get('flax', '(absent)')} beside jax {versions['jax']}: install "
            f"a flax that knows this jax ({type(error).__name__}: {error})"
        ) from error
    return gpu_decodes


STAGES = ("bandwidth", "target", "drafts", "batch_1", "launches", "batches")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default="gpu_check.json")
    parser.add_argument("--shape", choices=SETUPS, default="full")
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument(
        "--first", action="store_true", help="of the drafts, the first alone"
    )
    given = parser.parse_args(argv)
    stages = given.stages.split(",")
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        parser.error(f"--stages names {unknown[0]!r}: some of {','.join(STAGES)}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    setup = SETUPS[given.shape]
    if given.first:
        name = next(iter(setup.drafts))
        setup = dataclasses.replace(setup, drafts={name: setup.drafts[name]})
    report = Report(given.out, given.seconds)
    device = jax.devices()[0]
    report.content["device"] = {"kind": device.device_kind, "platform": device.platform}
    report.content["versions"] = _versions()
    report.content["shape"] = given.shape
    run = Run(setup, report)
    for name in stages:
        run.stage(name)
        own = report.content["stages"][name]
        print(f"{name}: {own.get('stopped', 'done')} ({own['at']} s)", flush=True)
    print(f"written: {given.out}")
    stopped = [own.get("stopped") for own in report.content["stages"].values()]
    return 1 if any(why not in (None, "the time limit") for why in stopped) else 0


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
