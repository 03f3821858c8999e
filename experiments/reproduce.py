"""Leviathan et al. 2023 (arXiv:2211.17192): every table and figure, beside the paper's.

    python -m experiments.reproduce --config=configs/leviathan.py:small --workdir=DIR \
        [--only=table1,table2,table3,table5,figure1,...,figure5,entropy]

Alpha, survival, lenience and the decode of Figure 1 come from the pair as it is; times
from models that are widened to a published size's cost, which write the same. Real
weights, by --config.target.checkpoint and --config.draft.checkpoint, need no widening.
Writes DIR/cells.jsonl as it goes, so that a run that was stopped goes on with what it
lacks, and report.md, report.html, metrics.json, numbers.csv and manifest.json, of all
that is known. Returns 1 where a cell failed or greedy tokens differ.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_collections
from absl import flags

from configs import leviathan as usual
from experiments import (
    baseline,
    build,
    cells,
    command,
    reproduce_cells,
    reproduce_tasks,
)
from experiments.reproduce_tasks import Task
from specjax import errors
from specjax.report import pages, plots
from specjax.report import reproduction as report

# What each part needs: nothing, laws of models, those of counts, times, or a decode.
PARTS: Mapping[str, frozenset[str]] = {
    "table1": frozenset(),
    "table2": frozenset({"models", "times"}),  # and Table 4, which adds to it
    "table3": frozenset({"models", "counts"}),
    "table5": frozenset({"models", "counts"}),
    "figure1": frozenset({"decodes"}),
    "figure2": frozenset(),
    "figure3": frozenset(),
    "figure4": frozenset(),
    "figure5": frozenset({"timeline"}),
    "entropy": frozenset({"entropy"}),
}
_ALSO = {"table4": "table2"}


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command; returns 1 where a cell failed or greedy tokens differ."""
    from rich.console import Console

    parts = chosen(values.only)
    targets = check(config)
    needs = frozenset().union(*(PARTS[part] for part in parts))
    tasks = read_tasks(config, targets, needs)
    workdir.mkdir(parents=True, exist_ok=True)
    store = cells.Cells(workdir / "cells.jsonl", settings_of(config))
    manifest = command.manifest(config, parts=parts)
    command.write_json(workdir / "manifest.json", manifest)
    console = Console()
    with console.status("") as status, compile_cache(workdir):
        run = reproduce_cells.Run(config, tasks, targets, store, needs, status.update)
        laws, moments = reproduce_cells.laws(run)
        # What is cheap comes first.
        found: dict[str, Any] = {
            "laws": laws,
            "entropy": moments,
            "decodes": reproduce_cells.decodes(run),
            "times": [],
            "baselines": [],
            "timeline": None,
        }
        for target in targets:
            for task in tasks:
                rows, alone = reproduce_cells.times(run, laws, target, task)
                found["times"] += rows
                found["baselines"] += alone
                # Some forty large programs use up the memory maps of a process.
                jax.clear_caches()
                write(found, store, manifest, parts, config, workdir)
        found["timeline"] = reproduce_cells.timeline(run)
    files = write(found, store, manifest, parts, config, workdir)
    for line in store.failed:
        console.print(f"failed: {line}", style="bold red", markup=False)
    tie = baseline.TIES[config.dtype]
    wrong = report.differing(found["times"], tie)
    for line in wrong:
        console.print(line, style="bold red", markup=False)
    print(f"written: {workdir}/{', '.join(files)}")
    return 1 if store.failed or wrong else 0


def chosen(only: str | None) -> list[str]:
    """The parts that ``--only`` names; all without it.

    Raises:
        errors.InputError: a part that there is not.
    """
    if only is None:
        return list(PARTS)
    wanted = [name.strip() for name in only.split(",")]
    for name in wanted:
        if name not in (*PARTS, *_ALSO):
            raise errors.InputError(
                f"--only has {name!r}: it takes some of {', '.join((*PARTS, *_ALSO))}"
            )
    return [part for part in PARTS if part in {_ALSO.get(n, n) for n in wanted}]


def check(config: ml_collections.ConfigDict) -> list[str]:
    """The costs of the target that are asked for.

    Raises:
        errors.InputError: a setting is missing, not known, or means nothing.
    """
    tables = ("task", "target_cost", "draft_cost")
    build.check_settings(config, usual.get_config(), tables=tables)
    build.check_max_length(config)
    build.buckets(config)
    build.named(build.DTYPES, config.dtype, "dtype")
    build.positive(config.acceptance, *config.acceptance, path="acceptance.")
    build.positive(config.timing, "repeats", path="timing.")
    for setting, path in ((config, ""), (config.figure5, "figure5.")):
        if not setting.gammas or not all(
            errors.is_whole(own) and own >= 1 for own in setting.gammas
        ):
            raise errors.InputError(
                f"config.{path}gammas is {tuple(setting.gammas)}: draft lengths from 1 "
                "on, such as 3,7"
            )
    if config.acceptance.depth < max(config.gammas):
        raise errors.InputError(
            f"config.acceptance.depth is {config.acceptance.depth}: at least the "
            f"longest of config.gammas, {max(config.gammas)}"
        )
    if not config.verify_growth >= 0:
        raise errors.InputError(
            f"config.verify_growth is {config.verify_growth}: at least 0"
        )
    lenient = tuple(config.leniences)
    if 1.0 not in lenient or not all(0 < own <= 1 for own in lenient):
        raise errors.InputError(
            f"config.leniences is {lenient}: numbers above 0 and at most 1, with 1"
        )
    reproduce_tasks.check_papers(config)
    for name, cost in config.target_cost.items():
        build.positive(cost, "lines", "repeats", path=f"target_cost.{name}.")
        reproduce_tasks.drafts_of(config, name)
    plots.check_plots()
    figure = config.figure5
    for name, table in (
        ("task", config.task),
        ("target", config.target_cost),
        ("draft", config.draft_cost),
    ):
        build.named(table, figure[name], f"figure5.{name}")
    return build.all_or_names(config, "target_costs", config.target_cost)


def read_tasks(
    config: ml_collections.ConfigDict, targets: list[str], needs: frozenset[str]
) -> list[Task]:
    """The tasks that are asked for; none where nothing needs them and they lack.

    Raises:
        errors.InputError: a file or a folder is missing, or a pair does not fit.
    """
    names = build.all_or_names(config, "tasks", config.task)
    try:
        tasks = [Task.read(config, name) for name in names]
        reproduce_tasks.check_drafts(tasks, targets)
    except errors.InputError:
        if needs:
            raise
        return []
    if "times" in needs:
        reproduce_tasks.check_memory(tasks, targets)
    if "timeline" in needs:
        own = [task for task in tasks if task.name == config.figure5.task]
        reproduce_tasks.check_memory(own, [config.figure5.target])
    return tasks


def settings_of(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What the numbers depend on besides the weights, which every cell names."""
    asked = ("tasks", "target_costs")
    return {name: own for name, own in config.to_dict().items() if name not in asked}


@contextlib.contextmanager
def compile_cache(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps compiled programs in the run's folder, unless jax has another place."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    if before[0] is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        yield
        return
    for name, value in zip(names, (str(workdir / "compiled"), 1.0), strict=True):
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


def write(
    found: Mapping[str, Any],
    store: cells.Cells,
    manifest: Mapping[str, Any],
    parts: list[str],
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
) -> list[str]:
    """Writes the report of what is known so far; returns the files' names."""
    content = {**found, "failed": store.failed, "table1": report.analytic()}
    command.write_json(workdir / "metrics.json", content)
    report.write_csv(content, workdir / "numbers.csv")
    settings = {"dtype": config.dtype, "tie": baseline.TIES[config.dtype]}
    blocks = report.blocks(content, parts, manifest, settings)
    title = "Fast inference by speculative decoding, reproduced"
    files = pages.write(blocks, workdir, "report", title)
    return [*files, "metrics.json", "numbers.csv", "manifest.json"]


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "only", None, "Parts, with commas between; default: all.", flag_values=values
    )


if __name__ == "__main__":
    command.run(main, define=_define)
