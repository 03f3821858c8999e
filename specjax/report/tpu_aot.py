"""What compiling for TPUs found: a line as it comes, a table in Markdown, a CSV."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.report.markdown import table as table_lines

Row = Mapping[str, Any]

_COLUMNS = (
    ("target", "target", "{}"),
    ("draft", "draft", "{}"),
    ("chip", "chip", "{}"),
    ("mesh", "mesh", "{}"),
    ("fits", "fits", "{}"),
    ("arguments, GB", "arguments", "{:.2f}"),
    ("temporaries, GB", "temporaries", "{:.3f}"),
    ("counted, GB", "counted", "{:.2f}"),
    ("step, MB", "step_bytes", "{:.0f}"),
    ("/ counted", "step_ratio", "{:.2f}"),
    ("verify / counted", "verify_ratio", "{:.2f}"),
    ("draft / counted", "draft_ratio", "{:.2f}"),
    ("c", "c", "{:.4f}"),
    ("c of bytes", "c_bytes", "{:.4f}"),
    ("v", "v", "{:.3f}"),
    ("v of bytes", "v_bytes", "{:.3f}"),
    ("growth / caches", "growth_ratio", "{:.2f}"),
    ("padding", "padding", "{:.2f}"),
    ("copies", "copies", "{}"),
    ("compile, s", "compile_seconds", "{:.0f}"),
)
_UNITS = {"arguments": 1e9, "temporaries": 1e9, "counted": 1e9, "step_bytes": 1e6}
_NOTES = (
    "arguments and temporaries: of the whole of `speculative_generate`, encoders "
    "included, with the first of the two output lengths; the caches are temporaries. "
    "counted: weights, caches and encoder outputs by our own count",
    "step, verify, draft: bytes that one decoder pass moves to and from the chip's "
    "memory, read off the compiled text, and what they are of our own count. XLA's own "
    "`bytes accessed` stands in the CSV: it also adds what is read again from on-chip "
    "memory, and takes slices for whole arrays",
    "c: a draft step / a target step; v: the target's pass over the block / a step; "
    "modelled from our count and the chip's published figures, and as the ratio of the "
    "compiled passes' bytes. Launches and latencies are in neither",
    "growth / caches: by how much the temporaries grow from the first output length to "
    "the second, of what the caches grow by as they are laid out: above 1 something is "
    "copied; below 1 some of them lie in on-chip memory. padding: of the caches to "
    "whole tiles, over their own size. copies: new arrays of a cache's shape that a "
    "loop makes in the chip's memory, writes in place apart",
)


def _fields(row: Row) -> dict[str, Any]:
    """The row with its ratios; what was not found is absent."""
    found = dict(row)
    for name in ("step", "verify", "draft"):
        if f"{name}_bytes" in row:
            found[f"{name}_ratio"] = row[f"{name}_bytes"] / row[f"{name}_counted"]
    if row.get("growth") is not None:
        found["growth_ratio"] = row["growth"] / row["caches_growth"]
        found["padding"] = row["caches_growth"] / row["caches_growth_counted"]
    if "copies" in row:
        found["copies"] = len(row["copies"])
    return found


def _cells(row: Row) -> list[str]:
    fields = _fields(row) | {"fits": "yes" if row["fits"] else "no"}
    return [
        form.format(fields[name] / _UNITS[name] if name in _UNITS else fields[name])
        if name in fields
        else "-"
        for _, name, form in _COLUMNS
    ]


def line(row: Row) -> str:
    """One pair on one chip, in a sentence.

    Args:
        row: from `experiments.tpu_aot`.
    """
    where = f"{row['target']}, {row['draft']} on {row['chip']}, {row['mesh']}"
    fields = _fields(row)
    traffic = (
        f"a step moves {row['step_bytes'] / 1e6:.0f} MB "
        f"({fields['step_ratio']:.2f} of our count), c {row['c']:.4f}, v {row['v']:.3f}"
    )
    if "refused" in row:
        return f"{where}: does not fit ({row['refused']}); {traffic}"
    fits = "fits" if row["fits"] else "does not fit"
    memory = (
        f"{row['arguments'] / 1e9:.2f} GB of arguments and "
        f"{row['temporaries'] / 1e9:.3f} of temporaries"
    )
    if "copies_caches" not in row:
        return f"{where}: {fits} ({memory}); {traffic}; {row['longer']} when longer"
    copied = "copied: see copies" if row["copies_caches"] else "not copied"
    return f"{where}: {fits} ({memory}); {traffic}; caches are {copied}"


def markdown(rows: Sequence[Row], failed: Sequence[str], settings: Row) -> str:
    """The table, with what its columns mean and what does not fit.

    Args:
        rows: one per pair and chip.
        failed: what could not be compiled, in words.
        settings: what all rows share.
    """
    shared = ", ".join(f"{name} {own}" for name, own in sorted(settings.items()))
    lines = table_lines(
        [title for title, _, _ in _COLUMNS],
        [form == "{}" for _, _, form in _COLUMNS],
        map(_cells, rows),
    )
    bad = [line(row) for row in rows if not row["fits"] or row.get("copies_caches")]
    notes = [*_NOTES, *bad, *(f"failed: {own}" for own in failed)]
    listed = "".join(f"- {note}.\n" for note in notes)
    return (
        f"# Speculative decoding, compiled for TPUs\n\n{shared}.\n\n{lines}\n{listed}"
    )


def write_csv(rows: Sequence[Row], path: pathlib.Path) -> None:
    """All numbers of all rows, in bytes and seconds.

    Args:
        rows: one per pair and chip.
        path: of the file.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names)
        out.writeheader()
        for row in rows:
            words = {"copies": " ".join(row.get("copies", ()))}
            out.writerow(dict(row) | (words if "copies" in row else {}))
