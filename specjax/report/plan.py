"""What each device would hold: a table for the terminal, and one in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.memory_plan import Plan
from specjax.report.markdown import table as table_lines
from specjax.roofline import Device

if TYPE_CHECKING:
    from rich.console import Console

Row = Mapping[str, Any]

_COMPILED = ("compiler", "code")
_PARTS = tuple(field.name for field in dataclasses.fields(Plan))
_NOTE = (
    "GB on each device. laws: logits of a block, and probabilities where tokens are "
    "drawn. activations: of the largest layer. compiler: arguments, temporaries, "
    "and outputs of the whole speculative loop; code: its program.\n"
)


def row(name: str, device: Device, mesh: str, plan: Plan) -> dict[str, Any]:
    """One place, with bytes by part.

    Args:
        name: of the place.
        device: one of its devices.
        mesh: how they are laid out.
        plan: what each holds.
    """
    return {
        "place": name,
        "device": device.name,
        "mesh": mesh,
        **dataclasses.asdict(plan),
        "total": plan.bytes,
        "memory": device.memory,
        "fits": plan.bytes <= device.memory,
    }


def _columns(rows: Sequence[Row]) -> list[str]:
    titles = ["device", "mesh", *(part.replace("_", " ") for part in _PARTS)]
    compiled = any("compiler" in own for own in rows)
    return [*titles, "total", *_COMPILED * compiled, "there", "fits"]


def _cells(own: Row, compiled: bool) -> list[str]:
    numbers = [own[part] for part in _PARTS] + [own["total"]]
    cells = [own["device"], own["mesh"], *(f"{x / 1e9:.3f}" for x in numbers)]
    none = "refused" if "refused" in own else "-"
    for name in _COMPILED * compiled:
        found = own.get(name)
        cells.append(none if found is None else f"{found / 1e9:.3f}")
    return [*cells, f"{own['memory'] / 1e9:.1f}", "yes" if own["fits"] else "no"]


def markdown(rows: Sequence[Row]) -> str:
    """The table, and what its columns are.

    Args:
        rows: of `row`; with `compiler`, its bytes, where a program was compiled.
    """
    titles = _columns(rows)
    cells = [_cells(own, "compiler" in titles) for own in rows]
    words = [index < 2 for index in range(len(titles))]
    text = table_lines(titles, words, cells) + "\n" + _NOTE
    told = [own for own in rows if "exchanges" in own]
    lines = [f"- {own['place']}: {exchanges(own)}.\n" for own in told]
    return text + "\n" * bool(lines) + "".join(lines)


def show(console: Console, rows: Sequence[Row]) -> None:
    """Prints the table, and what the compiler refused.

    Args:
        console: prints.
        rows: as of `markdown`.
    """
    from rich.table import Table

    titles = _columns(rows)
    cells = [_cells(own, "compiler" in titles) for own in rows]
    table = Table("", caption="GB on each device")
    for own in rows:
        table.add_column(own["place"], justify="right")
    for title, line in zip(titles, zip(*cells, strict=True), strict=True):
        table.add_row(title, *line)
    console.print(table)
    for own in rows:
        if "refused" in own:
            console.print(f"{own['place']}: refused: {own['refused']}", soft_wrap=True)
        elif "exchanges" in own:
            console.print(f"{own['place']}: {exchanges(own)}", soft_wrap=True)


def exchanges(own: Row) -> str:
    """What the devices of a place tell each other, as it stands in the program."""
    counts = [f"{count} {name}" for name, count in sorted(own["exchanges"].items())]
    return f"exchanges between devices in the program: {', '.join(counts) or 'none'}"
