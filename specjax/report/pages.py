"""A report as Markdown, and as one page of HTML that needs no other file."""

from __future__ import annotations

import dataclasses
import html
import pathlib
import re
from collections.abc import Sequence

from specjax.report import decodes
from specjax.report.markdown import table as table_lines


@dataclasses.dataclass(frozen=True)
class Heading:
    """A section's title.

    Attributes:
        text: of it.
        level: 1 for the page's own, 2 for its sections.
    """

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Prose:
    """Paragraphs, or points of a list.

    Attributes:
        lines: each a paragraph.
        points: whether it is a list.
        alarm: whether it is to be seen at once.
    """

    lines: Sequence[str]
    points: bool = False
    alarm: bool = False


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        titles: of the columns.
        rows: a cell per column.
        words: the columns that hold words; others hold numbers.
        marked: rows to set off, by number.
        caption: what the columns are.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset({0})
    marked: frozenset[int] = frozenset()
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing.

    Attributes:
        name: of its file.
        svg: the drawing.
        caption: what it shows.
    """

    name: str
    svg: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Coloured:
    """Decodes, token by token.

    Attributes:
        decoded: the decodes.
        caption: what they are.
    """

    decoded: decodes.Decoded
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Fold:
    """Something long that few will read.

    Attributes:
        title: what it is.
        text: as it stands.
    """

    title: str
    text: str


Block = Heading | Prose | Grid | Picture | Coloured | Fold


def markdown(blocks: Sequence[Block], folder: str) -> str:
    """The report in Markdown.

    Args:
        blocks: in order.
        folder: where the pictures lie, seen from the report.
    """
    return "\n".join(_markdown(block, folder) for block in blocks)


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}\n"
        case Prose():
            start, between = ("- ", "\n") if block.points else ("", "\n\n")
            lines = [f"**{line}**" if block.alarm else line for line in block.lines]
            return between.join(start + line for line in lines) + "\n"
        case Grid():
            rows = [
                [f"**{cell}**" if at in block.marked and cell else cell for cell in row]
                for at, row in enumerate(block.rows)
            ]
            words = [at in block.words for at in range(len(block.titles))]
            end = f"\n{block.caption}\n" if block.caption else ""
            return table_lines(block.titles, words, rows) + end
        case Picture():
            return f"![{block.name}]({folder}/{block.name}.svg)\n\n{block.caption}\n"
        case Coloured():
            caption = f"{block.caption} {decodes.plain_legend()}".lstrip()
            return f"```text\n{block.decoded}\n```\n\n{caption}.\n"
        case Fold():
            return f"## {block.title}\n\n```json\n{block.text}\n```\n"


_STYLE = """
:root { --ink: #1d2530; --pale: #5b6675; --line: #d9dee5; --band: #f5f7fa;
  --mark: #eef6ff; --paper: #fff; --link: #0a5aa8; --alarm: #fdf0ee;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --pale: #9aa6b4;
  --line: #3a434e; --band: #1c2229; --mark: #1d3145; --paper: #12161b; --link: #7cc0f5;
  --alarm: #3a1e1b; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.35rem; margin: 2.75rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p { margin: .6rem 0; } li { margin: .3rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .4rem .9rem; font-size: .9rem; }
nav a { color: var(--link); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: 1rem 0 .3rem; }
table { border-collapse: collapse; font-size: .88rem; min-width: 60%;
  font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; vertical-align: bottom; }
th, td { padding: .32rem .6rem; border-bottom: 1px solid var(--line); }
td { text-align: right; white-space: nowrap; }
th.w, td.w { text-align: left; }
td.w { white-space: normal; }
tbody tr:nth-child(even) { background: var(--band); }
tbody tr.m { background: var(--mark); font-weight: 600; }
.caption { color: var(--pale); font-size: .86rem; margin: .2rem 0 1rem; }
.alarm { border-left: 4px solid #c0392b; background: var(--alarm);
  padding: .5rem 1rem; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto;
  background: #fff; border-radius: .4rem; }
details { margin: 2rem 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; background: var(--band); padding: 1rem; font-size: .8rem; }
"""


def page(blocks: Sequence[Block], title: str) -> str:
    """The report as a page of HTML: drawings and styles are in it, and no script.

    Args:
        blocks: in order.
        title: of the window.
    """
    sections = [
        (_anchor(block.text), block.text)
        for block in blocks
        if isinstance(block, Heading) and block.level == 2
    ]
    links = "".join(f'<a href="#{a}">{html.escape(t)}</a>' for a, t in sections)
    parts, placed = [], False
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2 and not placed:
            parts.append(f"<nav>{links}</nav>")
            placed = True
        parts.append(_element(block))
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>{_STYLE}{decodes.STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _caption(text: str) -> str:
    return f'<p class="caption">{html.escape(text)}</p>' if text else ""


def _element(block: Block) -> str:
    match block:
        case Heading():
            own, level = html.escape(block.text), block.level
            place = f' id="{_anchor(block.text)}"' if level == 2 else ""
            return f"<h{level}{place}>{own}</h{level}>"
        case Prose():
            tag = "li" if block.points else "p"
            lines = "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in block.lines)
            if block.points:
                lines = f"<ul>{lines}</ul>"
            return f'<div class="alarm">{lines}</div>' if block.alarm else lines
        case Grid():
            return _grid(block)
        case Picture():
            return (
                f'<figure role="img" aria-label="{html.escape(block.name)}">'
                f"{block.svg}<figcaption>{_caption(block.caption)}</figcaption></figure>"
            )
        case Coloured():
            return block.decoded.html() + _caption(block.caption)
        case Fold():
            return (
                f"<details><summary>{html.escape(block.title)}</summary>"
                f"<pre>{html.escape(block.text)}</pre></details>"
            )


def _grid(block: Grid) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (" class=w" if at in block.words else "" for at in range(len(row)))
        return "".join(
            f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, row, strict=True)
        )

    lines = "".join(
        f"<tr{' class=m' if at in block.marked else ''}>{cells('td', row)}</tr>"
        for at, row in enumerate(block.rows)
    )
    head = f"<thead><tr>{cells('th', block.titles)}</tr></thead>"
    table = f"<table>{head}<tbody>{lines}</tbody></table>"
    return f'<div class="scroll">{table}</div>{_caption(block.caption)}'


def write(
    blocks: Sequence[Block], folder: pathlib.Path, name: str, title: str
) -> list[str]:
    """Writes the report both ways, and its drawings beside it.

    Args:
        blocks: in order.
        folder: that receives the files.
        name: of them, without its ending.
        title: of the page.

    Returns:
        the names of the two files.
    """
    pictures = folder / "figures"
    for block in blocks:
        if isinstance(block, Picture):
            pictures.mkdir(exist_ok=True)
            path = pictures / f"{block.name}.svg"
            path.write_text(block.svg, encoding="utf-8")
    made = {
        f"{name}.md": markdown(blocks, pictures.name),
        f"{name}.html": page(blocks, title),
    }
    for file, text in made.items():
        (folder / file).write_text(text, encoding="utf-8")
    return list(made)


def write_decodes(
    decoded: decodes.Decoded, path: pathlib.Path, title: str, about: Sequence[str] = ()
) -> None:
    """Writes decodes as a page of HTML that needs no other file.

    Args:
        decoded: what to show.
        path: of the page.
        title: of it.
        about: paragraphs to stand before them, such as settings and gains.
    """
    blocks: list[Block] = [Heading(title, 1), Prose(about), Coloured(decoded)]
    path.write_text(page(blocks, title), encoding="utf-8")
