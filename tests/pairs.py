"""A pair of tiny T5s on disk, and commands that run in the tests' own process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import numpy

from experiments import command, decode
from specjax import metrics
from specjax.data import tokenizer as tokenizers
from specjax.models import t5_weights
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "demo.py"
PIECES, SENTINELS, DEAD_ROWS = 130, 100, 6
KNOWN = PIECES + SENTINELS  # ids of the tokenizer
GAMMA, MAX_LENGTH, BUCKET = 3, 24, 32
TEXTS = (
    "a small server reads the mail and writes it to the disk",
    "the library opens images of many formats and shows them",
    "this package holds the files that every program needs",
    "it sends mails, parses tables and prints the pages of a book",
    "a game with a mouse, a cat and more than fifty levels",
    "the daemon starts at boot and stops when the disk is full",
)
LINES = (
    "the small mail server",
    "it opens images",
    "a game with a cat",
    "this package parses the tables",
    "many files",
    "the disk is full",
    "it prints pages and images",
)
SHAPE = T5Config(
    vocab_size=KNOWN + DEAD_ROWS,
    d_model=32,
    d_kv=8,
    num_heads=4,
    d_ff=48,
    num_encoder_layers=2,
    num_decoder_layers=2,
)


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where a pair and its input lie."""

    target: pathlib.Path
    draft: pathlib.Path
    input: pathlib.Path


def make_pair(folder: pathlib.Path) -> Folders:
    """A target whose laws are neither flat nor sure, and a draft that often agrees.

    The draft is the target's first layers, without the padding of its vocabulary.
    """
    folders = Folders(folder / "target", folder / "draft", folder / "input.txt")
    t5_weights.save_t5(
        jax.jit(T5, static_argnums=0)(SHAPE, jax.random.key(5)), folders.target
    )
    edit_weights(folders.target, _sharpen)
    shutil.copytree(folders.target, folders.draft)
    edit_weights(folders.draft, _shorten)
    fields = {"num_layers": 1, "num_decoder_layers": 1, "vocab_size": KNOWN}
    edit_config(folders.draft, **fields)
    model = folders.target / "spiece.model"
    tokenizers.train_sentencepiece(TEXTS, PIECES, model)
    shutil.copy(model, folders.draft)
    folders.input.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return folders


def edit_weights(
    folder: pathlib.Path, edit: Callable[[dict[str, np.ndarray]], None]
) -> None:
    """Changes a checkpoint's tensors where they lie."""
    path = folder / "model.safetensors"
    tensors = {name: np.array(own) for name, own in numpy.load_file(path).items()}
    edit(tensors)
    numpy.save_file(tensors, path)


def edit_config(folder: pathlib.Path, **fields: Any) -> None:
    """Changes fields of a checkpoint's config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _sharpen(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] *= 3.0
    tensors["lm_head.weight"][SHAPE.eos_id] *= 2.0  # likelier than one word in 236
    for name, tensor in tensors.items():
        if ".block.1." in name and name.split(".")[-2] in ("o", "wo"):
            tensor *= 0.3  # the second layers say less than the first


def _shorten(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if ".block.1." in name]:
        del tensors[name]
    for name in ("shared.weight", "lm_head.weight"):
        tensors[name] = np.array(tensors[name][:KNOWN])


def costs(gamma: int, c: float = 0.1, v: float = 1.2) -> metrics.Costs:
    """Made-up costs of a target step of one second."""

    def seconds(value: float) -> metrics.Timing:
        return metrics.Timing((value,))

    return metrics.Costs(
        gamma=gamma,
        step=seconds(1.0),
        verify=seconds(v),
        draft=seconds(c * gamma),
        encode=seconds(2.0),
        draft_encode=seconds(0.5),
    )


@contextlib.contextmanager
def costs_are(c: float = 0.1, v: float = 1.2) -> Iterator[None]:
    """Nothing is timed apart, and nothing compiled for it."""

    def measure_costs(*args: Any, gamma: int, **settings: Any) -> metrics.Costs:
        return costs(gamma, c, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "measure_costs", measure_costs)
        yield


@contextlib.contextmanager
def quick_costs() -> Iterator[None]:
    """Costs are measured, but too shortly to be any good."""
    quick = functools.partial(metrics.measure_costs, seconds=1e-3)

    def measure_costs(*args: Any, **settings: Any) -> metrics.Costs:
        return quick(*args, **settings | {"repeats": 1})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "measure_costs", measure_costs)
        yield


@dataclasses.dataclass(frozen=True)
class Run:
    """What a command did.

    Attributes:
        code: its exit code.
        workdir: its folder.
        out: what it printed.
        err: what it said on stderr.
    """

    code: int
    workdir: pathlib.Path
    out: str
    err: str

    def read(self, name: str) -> Any:
        """A JSON file of the run, or a list of the lines of a JSONL file."""
        text = (self.workdir / name).read_text(encoding="utf-8")
        if ".jsonl" in name:
            # A text may hold what Python takes for other ends of lines.
            return [json.loads(line) for line in text.split("\n") if line]
        return json.loads(text)

    @property
    def metrics(self) -> Any:
        return self.read("metrics.json")

    @property
    def decodes(self) -> Any:
        return self.read("decodes.jsonl")

    @property
    def effective(self) -> Any:
        return self.read("manifest.json")["effective"]


def less(flags: Sequence[str], settings: Sequence[str]) -> tuple[str, ...]:
    """The flags that no setting takes the place of."""
    given = {setting.partition("=")[0] for setting in settings}
    return tuple(flag for flag in flags if flag.partition("=")[0] not in given)


def run(
    main: Callable[..., Any], workdir: pathlib.Path, *argv: str, define: Any = None
) -> Run:
    """Runs a command as its command line would."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        command.run(main, ["command", *argv], define=define)
    return Run(caught.value.code, workdir, out.getvalue(), err.getvalue())


def pair_flags(folders: Folders) -> tuple[str, ...]:
    """The demo's config made small enough for a test."""
    return (
        f"--config={DEMO}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--config.buckets={BUCKET}",
        f"--config.max_length={MAX_LENGTH}",
        f"--config.gamma={GAMMA}",
        "--config.task_prefix=",
        "--config.repeats=1",
    )


def run_decode(
    folders: Folders, workdir: pathlib.Path, *settings: str, show: bool = False
) -> Run:
    """Runs `experiments.decode` on the pair.

    Args:
        folders: the pair.
        workdir: the run's folder.
        *settings: flags that take the place of those of `pair_flags`.
        show: decode once more, with a trace, for the coloured text.
    """
    flags = (*pair_flags(folders), f"--workdir={workdir}", f"--input={folders.input}")
    given = {setting.partition("=")[0] for setting in settings}
    flags = tuple(flag for flag in flags if flag.partition("=")[0] not in given)
    with pytest.MonkeyPatch.context() as patch:
        if not show:
            patch.setattr(decode, "_show", lambda *arguments: None)
        return run(decode.main, workdir, *flags, *settings, define=decode._define)
