"""What speculation would give by draft length and temperature: tables, a verdict."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.report.markdown import table as table_lines

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]

# Below it a predicted gain is within what predictions were wrong by on a quiet machine.
_SURE = 1.05
_COLUMNS = (
    ("gamma", "gamma", "{}"),
    ("predicted", "predicted", "{:.2f}x"),
    ("formula", "formula", "{:.2f}x"),
    ("loop", "loop", "{:.2f}x"),
    ("tokens", "tokens_per_call", "{:.2f}"),
    ("c", "c", "{:.3f}"),
    ("v", "v", "{:.2f}"),
)
_CAPTION = (
    "predicted: of whole decodes of these texts by token verification, with encoders "
    "and the cut at a text's end; formula: Leviathan et al.'s, from alpha and c, with "
    "v = 1 and no encoder; loop: from survival, c and v, without encoder and cut; "
    "tokens: per target call"
)


def verdict(found: Row, flags: str) -> str:
    """Whether speculation would pay, in a sentence, and with what flags.

    Args:
        found: one temperature, from `experiments.predict`.
        flags: of `experiments.decode`, that draw tokens so.
    """
    name, gamma = found["name"], found["best"]
    best = max(found["choices"][1:], key=lambda choice: choice["predicted"])
    gain = best["predicted"]
    why = (
        f"alpha {found['alpha']:.2f}, c {best['c']:.2f}, v {best['v']:.2f}, "
        f"{best['tokens_per_call']:.2f} tokens per target call"
    )
    if gamma == 0:
        return (
            f"{name}: speculation would not pay: its best, gamma {best['gamma']}, "
            f"gives {gain:.2f}x ({why}); decode with the target alone"
        )
    would = "would pay" if gain > _SURE else "would hardly pay"
    return (
        f"{name}: speculation {would}: {gain:.2f}x with gamma {gamma} ({why}), in "
        f"experiments.decode by --config.gamma={gamma} {flags}"
    )


def notes(drafter: str, asked: int, longest: int, found: Sequence[Row]) -> list[str]:
    """What a reader of the numbers must know.

    Args:
        drafter: its name.
        asked: the longest draft that was asked for.
        longest: the longest that the drafter drafts of these.
        found: by temperature.
    """
    made = [_CAPTION]
    if longest < asked:
        made.append(
            f"the drafter {drafter!r} drafts at most {longest} tokens: draft lengths "
            f"up to config.max_gamma = {asked} are out of its reach"
        )
    if any(own["counted"] for own in found):
        made.append(
            f"what {drafter!r} drafts differs by depth, so that survival was counted "
            f"in one decode with gamma {longest}; alpha is of a block's first token"
        )
    return made


def table(found: Sequence[Row]) -> Table:
    """Draft lengths by temperatures, for a terminal; the best of each is marked.

    Args:
        found: by temperature.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        title="predicted speedup (paper's formula)",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("gamma", justify="right")
    for own in found:
        made.add_column(f"{own['name']}\nalpha {own['alpha']:.2f}", justify="right")
    for gamma in range(len(found[0]["choices"])):
        cells = []
        for own in found:
            choice = own["choices"][gamma]
            text = f"{choice['predicted']:.2f}x ({choice['formula']:.2f}x)"
            cells.append(f"[bold]best {text}" if gamma == own["best"] else text)
        made.add_row(str(gamma), *cells)
    return made


def markdown(found: Sequence[Row], notes: Sequence[str]) -> str:
    """A table per temperature, with its verdict, and the notes.

    Args:
        found: by temperature.
        notes: sentences.
    """
    blocks = []
    for own in found:
        lines = table_lines(
            [title for title, _, _ in _COLUMNS],
            [False] * len(_COLUMNS),
            (_cells(choice, own["best"]) for choice in own["choices"]),
        )
        costs = own["costs"]
        blocks.append(
            f"## {own['name']}\n\n{own['verdict']}.\n\n"
            f"Over {own['tokens']} tokens of {own['texts']} texts; a target step takes "
            f"{1e3 * costs['step']:.3g} ms, the target's encoder {costs['encode']:.2f} "
            f"steps, the draft's {costs['draft_encode']:.2f}.\n\n" + lines
        )
    return "\n".join([*blocks, *(f"{note}.\n" for note in notes)])


def _cells(choice: Row, best: int) -> list[str]:
    cells = [
        "-" if choice[name] is None else form.format(choice[name])
        for _, name, form in _COLUMNS
    ]
    return [f"**{cell}**" for cell in cells] if choice["gamma"] == best else cells


def write_csv(found: Sequence[Row], path: pathlib.Path) -> None:
    """All numbers of all choices; survival is that of the depth gamma.

    Args:
        found: by temperature.
        path: of the file.
    """
    names = [name for _, name, _ in _COLUMNS]
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["temperature", "alpha", *names, "survival", "best"])
        for own in found:
            survival = [1.0, *own["survival"]]
            for choice, alive in zip(own["choices"], survival, strict=True):
                cells = [choice[name] for name in names]
                best = choice["gamma"] == own["best"]
                out.writerow([own["temperature"], own["alpha"], *cells, alive, best])
