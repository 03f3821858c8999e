"""Tasks of a reproduction: lines, models at a cost, and what they need of memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections

from configs import demo
from experiments import build, input_lines
from specjax import errors, roofline
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.models import t5_weights
from specjax.models.t5_config import T5Config
from specjax.models.widen import widened_config
from specjax.report import leviathan

TEMPERATURES = (0, 1)  # the paper's


@dataclasses.dataclass(frozen=True)
class Task:
    """Lines to decode, and where the models that decode them are.

    Attributes:
        name: of ``config.task``.
        config: all settings.
        rows: ids of the lines.
        bucket: that all lines are padded to, so that they share their programs.
        counts: texts that unigrams and bigrams are counted on; None: the target's own.
    """

    name: str
    config: ml_collections.ConfigDict
    rows: Sequence[Sequence[int]]
    bucket: int
    counts: Sequence[Sequence[int]] | None

    @classmethod
    def read(cls, config: ml_collections.ConfigDict, name: str) -> Task:
        """Reads and checks the lines.

        Raises:
            errors.InputError: a file or a folder is missing, or a line is too long.
        """
        own = config.task[name]
        path = input_lines.input_file(own.input)
        lines = input_lines.read_lines(path)
        folder = _folder(config, name)
        pieces = tokenizers.load_tokenizer(folder)
        rows = [pieces.encode(own.task_prefix + line) for line in lines]
        buckets = build.buckets(config)
        input_lines.check_lengths(rows, buckets, path)
        longest = max(map(len, rows))
        counts = None
        if own.counts:
            texts = input_lines.read_lines(input_lines.input_file(own.counts))
            counts = [pieces.encode(line) for line in texts]
        bucket = min(bucket for bucket in buckets if bucket >= longest)
        return cls(name, config, rows, bucket, counts)

    @property
    def paper(self) -> str:
        """The task of the paper that it stands for."""
        return str(self.config.task[self.name].paper)

    def decode_config(
        self, target: str = "", draft: str = "", widened: bool = True
    ) -> ml_collections.ConfigDict:
        """Settings of `experiments.decode`.

        Args:
            target: of ``config.target_cost``; empty: the target as it is.
            draft: of ``config.draft_cost``; empty: any, for a target alone.
            widened: whether the draft has that cost, or its own.
        """
        made, config = demo.get_config(), self.config
        made.target.checkpoint = config.target.checkpoint or self._own("target")
        made.target.widen = (target and config.target_cost[target].widen) or None
        made.update(dtype=config.dtype, max_length=config.max_length)
        made.draft.checkpoint = ""
        if draft:
            made.draft.checkpoint = self.draft_checkpoint(draft)
            made.draft.widen = (widened and config.draft_cost[draft].widen) or None
        return made

    def draft_checkpoint(self, draft: str) -> str:
        """Where a draft's weights are."""
        own = self.config.draft_cost[draft].checkpoint
        return own or self.config.draft.checkpoint or self._own("draft")

    def _own(self, role: str) -> str:
        folder = self.config.task[self.name].folder
        return f"{folder}/{role}" if folder else ""

    def stored(self, kind: str) -> str:
        """The folder of a drafter that was counted beforehand; empty: there is none.

        Args:
            kind: "unigram" or "bigram".
        """
        if self.config.target.checkpoint or self.counts is not None:
            return ""  # it is another target's, or is to be counted
        try:
            build.checkpoint_folder(self._own(kind), "")
        except errors.InputError:
            return ""
        return self._own(kind)

    def parts(self, rows: Sequence[Sequence[int]], batch: int) -> list[Any]:
        """Batches of one shape."""
        return list(batches.inference_batches(rows, batch, (self.bucket,)))

    def weights(self, draft: str = "", stored: str = "") -> str:
        """Short for the models' files and the lines: what a cell depends on.

        Args:
            draft: of ``config.draft_cost``; empty: none.
            stored: a folder from `stored`; empty: none.
        """
        made = self.decode_config(draft=draft)
        roles = {"target": made.target.checkpoint}
        if draft or stored:
            roles["draft"] = stored or made.draft.checkpoint
        found = {
            role: _fingerprint(build.checkpoint_folder(name, f"{role}.checkpoint"))
            for role, name in roles.items()
        }
        text = json.dumps([found, [list(row) for row in self.rows], self.counts])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _fingerprint(folder: pathlib.Path) -> str:
    return t5_weights.fingerprint(folder)


def _folder(config: ml_collections.ConfigDict, name: str) -> pathlib.Path:
    if config.target.checkpoint:
        return build.checkpoint_folder(config.target.checkpoint, "target.checkpoint")
    folder = config.task[name].folder
    if not folder:
        raise errors.InputError(
            "config.target.checkpoint is empty: name the folder of a model"
        )
    return build.checkpoint_folder(f"{folder}/target", f"task.{name}.folder")


def drafts_of(config: ml_collections.ConfigDict, target: str) -> list[str]:
    """The drafts that stand before a target.

    Raises:
        errors.InputError: none, or one that is not known.
    """
    own = config.target_cost[target]
    try:
        return build.names(own, "drafts", config.draft_cost)
    except errors.InputError as error:
        text = str(error).replace("config.", f"config.target_cost.{target}.", 1)
        raise errors.InputError(text) from error


def check_drafts(tasks: Sequence[Task], targets: Sequence[str]) -> None:
    """Refuses drafts that are missing, and two names for one draft.

    Raises:
        errors.InputError: naming the first.
    """
    for task in tasks:
        config = task.config
        for target in targets:
            seen: dict[tuple[pathlib.Path, str], str] = {}
            for name in drafts_of(config, target):
                own = config.draft_cost[name]
                place = build.checkpoint_folder(
                    task.draft_checkpoint(name),
                    f"draft_cost.{name}.checkpoint"
                    if own.checkpoint
                    else "draft.checkpoint",
                )
                other = seen.setdefault((place, own.widen), name)
                if other != name:
                    raise errors.InputError(
                        f"config.draft_cost.{name} is the same model at the same cost "
                        f"as {other}: set config.draft_cost.{name}.checkpoint, or "
                        f"leave it out of config.target_cost.{target}.drafts"
                    )


def check_papers(config: ml_collections.ConfigDict) -> None:
    """Refuses rows of the paper that it has not.

    Raises:
        errors.InputError: naming the first.
    """
    for kind, known in (("task", leviathan.TASKS), ("draft_cost", leviathan.DRAFTS)):
        for name, own in config[kind].items():
            if own.paper not in known:
                raise errors.InputError(
                    f"config.{kind}.{name}.paper is {own.paper!r}: one of "
                    f"{', '.join(known)}"
                )


def there() -> int | None:
    """Bytes of memory that models can take; None: not known."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return 1024 * int(found[0]) if found else None


def check_memory(tasks: Sequence[Task], targets: Sequence[str]) -> None:
    """Refuses pairs that do not fit, before anything is loaded.

    Args:
        tasks: whose pairs they are.
        targets: of ``config.target_cost``.

    Raises:
        errors.InputError: with the bytes needed and there, and what would fit.
    """
    have = there()
    if have is None:
        return
    for task in tasks:
        for target in targets:
            for draft in drafts_of(task.config, target):
                _check_fit(task, target, draft, have)


def _check_fit(task: Task, target: str, draft: str, have: int) -> None:
    config = task.config
    own = task.decode_config(target, draft)
    shapes = [_shape(own, role) for role in ("target", "draft")]
    slots = config.max_length + max((*config.gammas, *config.figure5.gammas)) + 1

    def need(dtype: str) -> int:
        found = roofline.memory_needed(shapes, dtype, slots=slots, source=task.bucket)
        return found.bytes

    wanted = need(config.dtype)
    if wanted <= have:
        return
    if config.dtype != "bfloat16" and need("bfloat16") <= have:
        way = f"in bfloat16 it takes {_gigabytes(need('bfloat16'))}: config.dtype"
    else:
        count = math.ceil(need("bfloat16") / have)
        way = (
            f"in bfloat16 a mesh of {count} such devices would hold it, and this "
            "command runs on one: take a smaller model or cost"
        )
    raise errors.InputError(
        f"config.target_cost.{target} with the draft {draft} does not fit: it takes "
        f"{_gigabytes(wanted)} in {config.dtype} and {_gigabytes(have)} are there; "
        + way
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _shape(own: ml_collections.ConfigDict, role: str) -> T5Config:
    folder = build.checkpoint_folder(own[role].checkpoint, f"{role}.checkpoint")
    shape = T5Config.from_json(folder / t5_weights.CONFIG_FILE)
    widen = own[role].widen
    return widened_config(shape, T5Config.preset(widen)) if widen else shape
