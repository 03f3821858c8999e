"""A study of drafts over divergence and texts: as a table, and as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.report.markdown import table as table_lines
from specjax.report.plots import COLOURS, check_plots

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]

_COLUMNS = (
    ("texts of", "writer", "{}"),
    ("divergence", "divergence", "{}"),
    ("alpha greedy", "alpha_greedy", "{:.3f}"),
    ("alpha T=1", "alpha_sampled", "{:.3f}"),
    ("tokens per call greedy", "tokens_per_call_greedy", "{:.2f}"),
    ("tokens per call T=1", "tokens_per_call_sampled", "{:.2f}"),
)
# A divergence keeps its colour and its shape.
_SHAPES = ("o", "s", "^", "D", "v", "P", "X")


def _cells(row: Row) -> list[str]:
    return [form.format(row[name]) for _, name, form in _COLUMNS]


def table(rows: Sequence[Row]) -> Table:
    """The study for a terminal.

    Args:
        rows: a run each: its writer, divergence, alphas and tokens per target call.
    """
    from rich.table import Table

    made = Table(title="drafts of one shape and start, by divergence and texts")
    for title, _, form in _COLUMNS:
        made.add_column(title, justify="left" if form == "{}" else "right")
    for row in rows:
        made.add_row(*_cells(row))
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table in Markdown."""
    return table_lines(
        [title for title, _, _ in _COLUMNS],
        [form == "{}" for _, _, form in _COLUMNS],
        map(_cells, rows),
    )


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws alpha of each run, greedy and at T = 1, by the writer of its texts.

    Args:
        rows: see `table`.
        path: of the picture.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    writers = list(dict.fromkeys(row["writer"] for row in rows))
    names = list(dict.fromkeys(row["divergence"] for row in rows))
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, way in zip(axes, ("greedy", "sampled"), strict=True):
        for at, name in enumerate(names):
            place = at % len(COLOURS)
            own = [row for row in rows if row["divergence"] == name]
            # Side by side, so that equal values do not hide each other.
            shift = (at - (len(names) - 1) / 2) * 0.1
            axis.plot(
                [writers.index(row["writer"]) + shift for row in own],
                [row[f"alpha_{way}"] for row in own],
                _SHAPES[place],
                color=COLOURS[place],
                label=name.replace("_", " "),
            )
        axis.set_xticks(range(len(writers)), writers)
        axis.set_xlabel("writer of the training texts")
        axis.set_title("greedy" if way == "greedy" else "sampled, T = 1")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("alpha on held-out texts of the target")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", title="divergence")
    figure.savefig(path, dpi=150)
