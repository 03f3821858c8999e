"""A table in Markdown, as all reports write it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(
    titles: Sequence[str], words: Sequence[bool], rows: Iterable[Sequence[str]]
) -> str:
    """Lines of a table.

    Args:
        titles: of the columns.
        words: whether a column holds words, which start at the left; numbers end at
            the right.
        rows: a cell per column.
    """
    rule = ["---" if own else "---:" for own in words]
    lines = [titles, rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
