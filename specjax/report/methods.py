"""Drafters side by side: as tables, and as a picture."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.report.markdown import table as table_lines
from specjax.report.plots import COLOURS, check_plots

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]

_COLUMNS = (
    ("method", "method", "{}"),
    ("run", "mode", "{}"),
    ("gamma", "gamma", "{}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("predicted", "predicted_whole", "{:.2f}x"),
    ("of the loop", "predicted", "{:.2f}x"),
    ("tokens", "tokens_per_call", "{:.2f}"),
    ("c", "c", "{:.3f}"),
    ("v", "v", "{:.2f}"),
    ("draft", "draft_share", "{:.0%}"),
    ("MB", "megabytes", "{:.1f}"),
    ("training", "training", "{}"),
)
# A terminal has room for these.
_SHOWN = {"method", "mode", "gamma", "speedup", "predicted_whole", "tokens_per_call"}
_SHOWN |= {"c", "draft_share"}
_WHERE = (("task", "task", "{}"), ("target's cost", "level", "{}"))
_CAPTION = (
    "speedup: measured, per token; predicted: from the passes counted, c, v and the "
    "encoders; tokens: per target call; draft: its share of the loop's time"
)
_MORE = "; of the loop: from survival, c and v alone; MB: of the drafter's own arrays"
# What a reader of the costs on a widened target must know.
_WIDENED = (
    ". On a widened target a drafter's own weights keep the size that they have in "
    "front of the shipped one: a head (medusa, eagle, early_exit) that was trained for "
    "a target so wide would be wider, and its c greater"
)


def _cells(row: Row, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    return [form.format(row[name]) for _, name, form in columns]


def table(rows: Sequence[Row], title: str) -> Table:
    """Methods of one task at one cost of its target, for a terminal.

    Args:
        rows: one per method and mode.
        title: of the table.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        title=title,
        caption=_CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown = [column for column in _COLUMNS if column[1] in _SHOWN]
    for name, _, form in shown:
        words = form == "{}"
        made.add_column(name, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        made.add_row(*_cells(row, shown))
    return made


def markdown(rows: Sequence[Row]) -> str:
    """All rows as one table in Markdown."""
    widened = any(row.get("widened") for row in rows)
    columns = (*_WHERE, *_COLUMNS)
    lines = table_lines(
        [title for title, _, _ in columns],
        [form == "{}" for _, _, form in columns],
        (_cells(row, columns) for row in rows),
    )
    return lines + f"\n{_CAPTION}{_MORE}{_WIDENED if widened else ''}\n"


def write_csv(rows: Sequence[Row], path: pathlib.Path) -> None:
    """All numbers of all rows; survival by depth stands in columns of its own."""
    deepest = max((len(row["survival"]) for row in rows), default=0)
    names = [name for _, name, _ in (*_WHERE, *_COLUMNS)]
    names += [
        "tokens_per_second",
        "plain_tokens_per_second",
        "acceptance_rate",
        "lines",
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow([*names, *(f"survival_{i + 1}" for i in range(deepest))])
        for row in rows:
            out.writerow([*(row.get(name, "") for name in names), *row["survival"]])


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Measured speedup of every method, with the prediction as a mark beside it.

    Args:
        rows: see `table`; of several tasks and costs.
        path: of the picture.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    tasks, levels, names, modes = (
        list(dict.fromkeys(row[key] for row in rows))
        for key in ("task", "level", "method", "mode")
    )
    size = (1 + 0.45 * len(names) * max(len(levels), 1), 3.4 * max(len(tasks), 1))
    figure = Figure(figsize=(max(size[0], 7), size[1]), layout="constrained")
    grid = figure.subplots(
        max(len(tasks), 1), max(len(levels), 1), sharey=True, squeeze=False
    )
    for task, line in zip(tasks, grid, strict=True):
        for level, axis in zip(levels, line, strict=True):
            for at, mode in enumerate(modes):
                own = {
                    row["method"]: row
                    for row in rows
                    if (row["task"], row["level"], row["mode"]) == (task, level, mode)
                }
                places = [i + 0.4 * (at - 0.5) for i, n in enumerate(names) if n in own]
                found = [own[name] for name in names if name in own]
                axis.bar(
                    places,
                    [row["speedup"] for row in found],
                    width=0.38,
                    color=COLOURS[at],
                    label=f"{mode}, measured",
                )
                axis.plot(
                    places,
                    [row["predicted_whole"] for row in found],
                    "_",
                    color="black",
                    markersize=9,
                    label="predicted" if at == 0 else None,
                )
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
            axis.set_title(f"{task}, target at {level} cost")
        line[0].set_ylabel("speedup")
    if rows:
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=150)
