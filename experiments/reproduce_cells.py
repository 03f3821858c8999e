"""Cells of a reproduction: what is computed once, and kept where a run was stopped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from experiments import (
    build,
    cells,
    reproduce_laws,
    reproduce_tasks,
    reproduce_times,
)
from experiments.reproduce_tasks import TEMPERATURES, Task


@dataclasses.dataclass(frozen=True)
class Run:
    """What all parts share.

    Attributes:
        config: the settings.
        tasks: that are asked for.
        targets: costs that are.
        store: has what is done already.
        needs: what the parts that are asked for need, see `reproduce.PARTS`.
        show: tells what is under way.
    """

    config: ml_collections.ConfigDict
    tasks: list[Task]
    targets: list[str]
    store: cells.Cells
    needs: frozenset[str]
    show: Callable[[str], None]

    def cell(
        self, kind: str, key: Mapping[str, str], make: Callable[[], cells.Row]
    ) -> cells.Row | None:
        """A result: made if its kind is needed, else as it is known."""
        if kind in self.needs:
            self.show(", ".join(key.values()))
            return self.store.get(key, make)
        return self.store.find(key)

    def drafts(self, task: Task) -> dict[str, str]:
        """A name for each draft's weights, of those that differ."""
        found: dict[str, str] = {}
        for target in self.targets:
            for name in reproduce_tasks.drafts_of(self.config, target):
                found.setdefault(task.draft_checkpoint(name), name)
        return {name: place for place, name in found.items()}


def laws(run: Run) -> tuple[list[cells.Row], list[cells.Row]]:
    """Alpha by lenience, and survival: of each task, temperature and draft.

    Returns:
        these, and moments of each target's laws at temperature 1.
    """
    found: list[cells.Row] = []
    moments: list[cells.Row] = []
    for task in run.tasks:
        own = task.decode_config()
        target = functools.cache(functools.partial(build.load_target, own))
        written = functools.cache(functools.partial(_write, task, target))
        models = run.drafts(task)
        for temperature in TEMPERATURES:
            for kind in (*reproduce_laws.COUNTED, *models):
                is_model = kind in models
                stored = "" if is_model else task.stored(kind)
                key = {
                    "part": "laws",
                    "task": task.name,
                    "temperature": str(temperature),
                    "draft": "model" if is_model else kind,
                    "weights": task.weights(kind if is_model else "", stored),
                }
                make = functools.partial(
                    _laws, run, task, target, written, temperature, kind, is_model
                )
                made = run.cell("models" if is_model else "counts", key, make)
                if made is not None:
                    found.append(
                        {
                            "task": task.name,
                            "paper": task.paper,
                            "temperature": temperature,
                            "draft": kind,
                            "model": is_model,
                            "checkpoint": models.get(kind, ""),
                            "paper_draft": run.config.draft_cost[kind].paper
                            if is_model
                            else kind,
                            "own_counts": task.counts is None and not stored,
                            **made,
                        }
                    )
        key = {"part": "entropy", "task": task.name, "weights": task.weights()}
        made = run.cell("entropy", key, functools.partial(_entropy, written))
        if made is not None:
            moments.append({"task": task.name, **made})
    return found, moments


def _write(
    task: Task, target: Callable[[], build.Target], temperature: int
) -> reproduce_laws.Writings:
    return reproduce_laws.write(task, target(), temperature)


def _entropy(written: Callable[[int], reproduce_laws.Writings]) -> cells.Row:
    return reproduce_laws.entropy(written(1))


def _laws(
    run: Run,
    task: Task,
    target: Callable[[], build.Target],
    written: Callable[[int], reproduce_laws.Writings],
    temperature: int,
    kind: str,
    is_model: bool,
) -> cells.Row:
    writings = written(temperature)
    if is_model:
        own = task.decode_config(draft=kind, widened=False)
        found = writings.model(build.build_pair(own, target()))
    else:
        texts = [text for own in TEMPERATURES for text in written(own).texts]
        found = reproduce_laws.counted_laws(task, target(), writings, texts, kind)
    return reproduce_laws.judge(
        writings, found, run.config.leniences, run.config.acceptance.depth
    )


def decodes(run: Run) -> list[cells.Row]:
    """Figure 1 of each task."""
    found = []
    for task in run.tasks:
        draft = next(iter(run.drafts(task)))
        key = {"part": "figure1", "task": task.name, "weights": task.weights(draft)}

        def make(task: Task = task, draft: str = draft) -> cells.Row:
            own = task.decode_config(draft=draft, widened=False)
            gamma = max(run.config.gammas)
            return reproduce_times.traced(task, build.build_pair(own), gamma)

        made = run.cell("decodes", key, make)
        if made is not None:
            found.append({"task": task.name, **made})
    return found


def times(
    run: Run, known: Sequence[cells.Row], target: str, task: Task
) -> tuple[list[cells.Row], list[cells.Row]]:
    """Rows of Table 2 of one task and target, and their baselines.

    Args:
        run: what all share.
        known: from `laws`.
        target: of ``config.target_cost``.
        task: the lines.
    """
    rows: list[cells.Row] = []
    alone: list[cells.Row] = []
    load = functools.cache(lambda: build.load_target(task.decode_config(target)))
    for temperature in TEMPERATURES:
        where = {"task": task.name, "temperature": temperature, "target": target}
        drafts = reproduce_tasks.drafts_of(run.config, target)
        keys = {name: _key(task, where, name) for name in ("", *drafts)}
        accepted = {name: _accepted(known, task, name, temperature) for name in drafts}
        lacking = {
            name: own
            for name, own in accepted.items()
            if run.store.find(keys[name]) is None
        }
        # What lacks is timed together, once.
        group = functools.cache(
            functools.partial(_group, run, task, temperature, target, load, lacking)
        )
        for name, key in keys.items():
            made = run.cell("times", key, functools.partial(_take, group, name))
            about = where | {"paper": task.paper}
            if made is not None and not name:
                alone.append(about | made)
            own = accepted.get(name)
            if made is not None and own is not None:
                rows.append(
                    about
                    | {
                        "draft": name,
                        "paper_draft": run.config.draft_cost[name].paper,
                        "alpha": own["alpha"]["1.0"]["mean"],
                        "survival": own["survival"],
                    }
                    | made
                )
    return rows, alone


def _key(task: Task, where: Mapping[str, Any], draft: str) -> dict[str, str]:
    key = {name: str(value) for name, value in where.items()}
    key |= {"part": "times", "draft": draft} if draft else {"part": "baseline"}
    return key | {"weights": task.weights(draft)}


def _group(
    run: Run,
    task: Task,
    temperature: int,
    target: str,
    load: Callable[[], build.Target],
    lacking: Mapping[str, cells.Row | None],
) -> dict[str, Any]:
    def choice(own: cells.Row | None) -> Callable[[build.Pair], int]:
        def gamma(pair: build.Pair) -> int:
            if own is None:
                raise RuntimeError("its survival is not known")
            return reproduce_times.choose_gamma(task, pair, own["survival"])

        return gamma

    group = reproduce_times.Group(task, temperature, target, load())
    chosen = {name: choice(own) for name, own in lacking.items()}
    return reproduce_times.run(group, chosen, run.show)


def _take(group: Callable[[], dict[str, Any]], name: str) -> cells.Row:
    made = group()[name]
    if isinstance(made, Exception):
        raise made
    return dict(made)


def _accepted(
    known: Sequence[cells.Row], task: Task, draft: str, temperature: int
) -> cells.Row | None:
    wanted = (task.name, temperature, task.draft_checkpoint(draft))
    for row in known:
        if (row["task"], row["temperature"], row["checkpoint"]) == wanted:
            return row
    return None


def timeline(run: Run) -> cells.Row | None:
    """Figure 5."""
    own = run.config.figure5
    task = next((task for task in run.tasks if task.name == own.task), None)
    if task is None:
        return None
    key = {"part": "figure5", "task": own.task, "target": own.target}
    key |= {"draft": own.draft, "weights": task.weights(own.draft)}

    def make() -> cells.Row:
        small = build.build_pair(task.decode_config(draft=own.draft, widened=False))
        drawn = [reproduce_times.traced(task, small, gamma) for gamma in own.gammas]
        target = build.load_target(task.decode_config(own.target))
        pair = build.build_pair(task.decode_config(own.target, own.draft), target)
        group = reproduce_times.Group(task, 0, own.target, target)
        return reproduce_times.lanes(group, pair, drawn)

    made = run.cell("timeline", key, make)
    return made and {"target": own.target, "draft": own.draft, **made}
