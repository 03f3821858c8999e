"""Every drafter at its best setting on the same lines: gains, costs, predictions.

    python -m experiments.compare --config=configs/methods_ende.py --workdir=DIR

Acceptance is counted once per task, on the shipped target: widening keeps what it
writes. Times are taken at each level of the target's cost. A method's draft length is
the best that (survival, c, v) predict; what is measured there stands beside it.
Writes DIR/cells.jsonl as it goes, so that a comparison that was stopped goes on with
the cells that it lacks, and methods.md, methods.csv, methods.png, metrics.json.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags

from configs import demo, methods_ende
from experiments import (
    baseline,
    build,
    cells,
    command,
    input_lines,
    method_costs,
    side_by_side,
)
from specjax import errors, metrics
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.drafters import files
from specjax.report import break_even, plots
from specjax.report import methods as report
from specjax.sampling import Sampling
from specjax.verify import token_verify

MODES = ("greedy", "sampled")


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command; returns 1 where a cell failed or greedy tokens differ."""
    from rich.console import Console

    del values
    names = check(config)
    tasks = [
        Task.read(config, name) for name in build.names(config, "tasks", config.task)
    ]
    levels = build.names(config, "levels", config.level)
    # Every drafter is loaded once, so that what is missing is told before all else.
    shipped = {
        task.name: build.load_target(task.decode_config(config, names[0]))
        for task in tasks
    }
    about = {
        task.name: describe(config, task, names, shipped[task.name]) for task in tasks
    }
    workdir.mkdir(parents=True, exist_ok=True)
    store = cells.Cells(workdir / "cells.jsonl", settings_of(config, about))
    command.write_json(workdir / "manifest.json", command.manifest(config))
    console = Console()
    rows: list[cells.Row] = []
    for task in tasks:
        for level in levels:
            with console.status(f"{task.name}, target at {level} cost") as status:
                made = run_level(
                    config,
                    task,
                    level,
                    names,
                    shipped[task.name],
                    store,
                    status.update,
                )
            made = [row | about[task.name][row["method"]] for row in made]
            rows += made
            console.print(report.table(made, f"{task.name}, target at {level} cost"))
            write(rows, store.failed, workdir)
    for line in store.failed:
        console.print(f"[bold red]failed: {line}")
    wrong = [row for row in rows if row["mismatches"]]
    for row in wrong:
        console.print(
            f"[bold red]{row['task']}, {row['method']}, {row['mode']}: "
            f"{row['mismatches']} lines are not the target's own"
        )
    print(f"written: {workdir}/methods.md, methods.csv, methods.png, metrics.json")
    return 1 if store.failed or wrong else 0


def check(config: ml_collections.ConfigDict) -> list[str]:
    """The methods that are asked for.

    Raises:
        errors.InputError: a setting is missing, not known, or means nothing.
    """
    known = methods_ende.get_config()
    build.check_settings(config, known, tables=("task", "level", "method"))
    build.positive(config, "gamma", "seeds")
    build.positive(config.timing, "repeats", path="timing.")
    for name, level in config.level.items():
        build.positive(level, "lines", "repeats", path=f"level.{name}.")
    build.check_max_length(config)
    plots.check_plots()
    return build.all_or_names(config, "methods", config.method)


def write(rows: list[cells.Row], failed: list[str], workdir: pathlib.Path) -> None:
    """Writes the reports of what is known so far."""
    passes = break_even.compare(rows)
    command.write_json(
        workdir / "metrics.json",
        {"rows": rows, "one_pass": passes, "failed": failed},
    )
    tables = (report.markdown(rows), break_even.markdown(passes))
    (workdir / "methods.md").write_text("\n".join(tables), encoding="utf-8")
    report.write_csv(rows, workdir / "methods.csv")
    report.plot(rows, workdir / "methods.png")


@dataclasses.dataclass(frozen=True)
class Task:
    """Lines to decode, and the folder of the models that decode them.

    Attributes:
        name: of ``config.task``.
        folder: of the target and the drafters.
        rows: ids of the lines.
    """

    name: str
    folder: str
    rows: Sequence[Sequence[int]]

    @classmethod
    def read(cls, config: ml_collections.ConfigDict, name: str) -> Task:
        """Reads and checks the lines.

        Raises:
            errors.InputError: a file or a folder is missing, or a line is too long.
        """
        own = config.task[name]
        path = input_lines.input_file(own.input)
        folder = build.checkpoint_folder(f"{own.folder}/target", f"task.{name}.folder")
        pieces = tokenizers.load_tokenizer(folder)
        rows = [
            pieces.encode(own.task_prefix + line)
            for line in input_lines.read_lines(path)
        ]
        input_lines.check_lengths(rows, build.buckets(config), path)
        return cls(name, own.folder, rows)

    def decode_config(
        self, config: ml_collections.ConfigDict, method: str, widen: str = ""
    ) -> ml_collections.ConfigDict:
        """Settings of `experiments.decode` for one method.

        Args:
            config: the settings.
            method: of ``config.method``.
            widen: what the target is widened to; empty: nothing.

        Raises:
            errors.InputError: the method has settings that drafters have not.
        """
        made, own = demo.get_config(), config.method[method]
        made.target.checkpoint = f"{self.folder}/target"
        made.target.widen = widen or None
        made.update(
            dtype=config.dtype, max_length=config.max_length, drafter=own.drafter
        )
        made.draft.checkpoint = own.checkpoint.format(folder=self.folder)
        made.lock()  # so that what is not known is refused
        try:
            made.draft.update(own.draft)
        except (AttributeError, KeyError, TypeError) as error:
            raise errors.InputError(
                f"config.method.{method}.draft has a setting that config.draft of "
                f"experiments.decode has not ({error})"
            ) from error
        return made


def describe(
    config: ml_collections.ConfigDict,
    task: Task,
    names: Sequence[str],
    shipped: build.Target,
) -> dict[str, dict[str, Any]]:
    """What each method is: bytes of its arrays, its training, its files' fingerprints.

    Args:
        config: the settings.
        task: has the folders.
        names: of the methods.
        shipped: the task's target.

    Raises:
        errors.InputError: a method cannot be loaded.
    """
    made = {}
    for name in names:
        own = task.decode_config(config, name)
        try:
            pair = build.build_pair(own, shipped)
        except errors.InputError as error:
            raise errors.InputError(
                f"the method {name} of {task.name}: {error}"
            ) from error
        training = ""
        if own.draft.checkpoint:
            folder = build.checkpoint_folder(own.draft.checkpoint, "draft.checkpoint")
            if (folder / files.DRAFTER_FILE).is_file():
                about = files.read_header(folder)["about"]
                if "minutes" in about:
                    training = f"{about['minutes']} min"
        made[name] = {
            "megabytes": sum(
                np.asarray(leaf).nbytes for leaf in jax.tree.leaves(pair.drafter)
            )
            / 1e6,
            "training": training,
            "weights": build.fingerprints(own),
        }
    return made


def settings_of(
    config: ml_collections.ConfigDict, about: dict[str, Any]
) -> dict[str, Any]:
    """What the numbers depend on; which cells are asked for is not among it."""
    asked = ("tasks", "levels", "methods")
    own = {name: value for name, value in config.to_dict().items() if name not in asked}
    weights = {
        task: {name: row["weights"] for name, row in methods.items()}
        for task, methods in about.items()
    }
    return own | {"weights": weights}


def run_level(
    config: ml_collections.ConfigDict,
    task: Task,
    level: str,
    names: Sequence[str],
    shipped: build.Target,
    store: cells.Cells,
    show: Any,
) -> list[cells.Row]:
    """All methods of a task at one cost of its target, in both modes.

    Args:
        config: the settings.
        task: the lines.
        level: of ``config.level``.
        names: of the methods.
        shipped: the task's target, which acceptance is counted on.
        store: has what is done already.
        show: tells what is under way.
    """
    own = config.level[level]
    rows = task.rows[: own.lines]
    parts = list(batches.inference_batches(rows, 1, build.buckets(config)))

    @functools.cache  # and not before a cell asks for it: a wide one is large
    def plain() -> build.Target:
        if not own.widen:
            return shipped
        return build.load_target(task.decode_config(config, names[0], own.widen))

    def work(mode: str) -> method_costs.Work:
        return method_costs.Work(
            target=plain().model,
            parts=parts,
            keys=build.row_keys(config.seed, len(rows)),
            sampling=sampling_of(config, mode, plain().num_tokens),
            max_length=config.max_length,
            gamma=config.gamma,
            seconds=config.timing.seconds,
            repeats=config.timing.repeats,
            rounds=own.repeats,
        )

    def alone(mode: str) -> cells.Row:
        return method_costs.target_costs(work(mode))

    def measured(
        name: str, mode: str, counted: cells.Row, costs: cells.Row
    ) -> cells.Row:
        settings = task.decode_config(config, name, own.widen)
        return measure(settings, plain(), work(mode), counted, costs)

    made = []
    for mode in MODES:
        show(f"{task.name}, {level}, {mode}: the target alone")
        costs = store.get(
            {"task": task.name, "level": level, "mode": mode},
            functools.partial(alone, mode),
        )
        for name in names:
            show(f"{task.name}, {level}, {mode}: {name}")
            counted = store.get(
                {"task": task.name, "method": name, "mode": mode},
                functools.partial(count, config, task, name, mode, shipped),
            )
            if costs is None or counted is None:
                continue  # the store lists what failed
            key = {"task": task.name, "level": level, "mode": mode, "method": name}
            found = store.get(
                key, functools.partial(measured, name, mode, counted, costs)
            )
            if found is not None:
                made.append(key | found | counted | {"widened": bool(own.widen)})
    return made


def sampling_of(
    config: ml_collections.ConfigDict, mode: str, num_tokens: int | None
) -> Sampling:
    """How a mode draws."""
    temperature = None if mode == "greedy" else config.temperature
    return Sampling(temperature=temperature, num_tokens=num_tokens)


def count(
    config: ml_collections.ConfigDict,
    task: Task,
    name: str,
    mode: str,
    shipped: build.Target,
) -> dict[str, Any]:
    """Acceptance of a method at the greatest draft length, all lines in one batch."""
    pair = build.build_pair(task.decode_config(config, name), shipped)
    draws = 1 if mode == "greedy" else config.seeds
    rows = [row for row in task.rows for _ in range(draws)]
    (part,) = batches.inference_batches(rows, len(rows), build.buckets(config)[-1:])
    stats = baseline.speculate(
        pair.target,
        pair.drafter,
        part,
        build.row_keys(config.seed, len(rows)),
        verifier=token_verify,
        sampling=sampling_of(config, mode, pair.num_tokens),
        gamma=config.gamma,
        max_length=config.max_length,
    ).stats
    return {
        "survival": metrics.survival(stats),
        "acceptance_rate": metrics.acceptance_rate(stats),
    }


def measure(
    own: ml_collections.ConfigDict,
    plain: build.Target,
    work: method_costs.Work,
    counted: dict[str, Any],
    costs: dict[str, Any],
) -> dict[str, Any]:
    """Times a method's draft, chooses its draft length, and decodes with it.

    Args:
        own: settings of `experiments.decode`.
        plain: the target.
        work: the lines.
        counted: from `count`.
        costs: from `method_costs.target_costs`.
    """
    pair = build.build_pair(own, plain)
    draft = method_costs.draft_seconds(work, pair.drafter)
    choices = method_costs.predict(counted["survival"], costs, draft)
    best = max(choices, key=lambda choice: choice["predicted"])
    setup = side_by_side.Setup(pair, token_verify, work.max_length)
    share = best["gamma"] * best["c"]
    return {
        **best,
        "draft_share": share / (share + best["v"]),
        **method_costs.run(setup, work, best, costs),
        "choices": choices,
    }


if __name__ == "__main__":
    command.run(main)
