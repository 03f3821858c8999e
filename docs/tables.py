"""Writes the tables of `commands.md` from the sources, so that none is left out.

python docs/tables.py
"""

from __future__ import annotations

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "commands.md"

# Flags beside --config and --workdir, defined where a command defines its own.
_FLAG = re.compile(r"DEFINE_\w+\(\s*\"(\w+)\"|add_argument\(\s*\"--(\w+)\"")
_COMMAND = re.compile(r"python -m experiments\.(\w+)")
# A config that is a part of others, and no command's own.
SHARED = ("drafting",)


def docstring(path: pathlib.Path) -> str:
    """Of a module, which is not imported."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def commands() -> dict[str, pathlib.Path]:
    """The modules of `experiments` that run as commands, by name."""
    paths = sorted((ROOT / "experiments").glob("*.py"))
    return {p.stem: p for p in paths if '__name__ == "__main__"' in p.read_text()}


def configs() -> dict[str, pathlib.Path]:
    """The config files that a command reads, by name."""
    paths = sorted((ROOT / "configs").glob("*.py"))
    return {p.stem: p for p in paths if p.stem not in ("__init__", *SHARED)}


def flags(command: str) -> list[str]:
    """Flags of a command beside `--config` and `--workdir`."""
    text = commands()[command].read_text(encoding="utf-8")
    borrowed = re.search(r"define=(\w+)\.define", text)
    own = flags(borrowed[1]) if borrowed else []
    return own + [one or other for one, other in _FLAG.findall(text)]


def command_of(config: str) -> str:
    """The command that a config's docstring calls with it; "" where it calls none."""
    path = configs()[config]
    for line in docstring(path).splitlines():
        found = _COMMAND.search(line)
        if found and f"configs/{path.name}" in line:
            return found[1]
    return ""


def command_table() -> list[str]:
    """A row per command: its first line, its own flags."""
    rows = ["| command | does | flags of its own |", "|---|---|---|"]
    for name, path in commands().items():
        own = ", ".join(f"`--{flag}`" for flag in flags(name)) or "-"
        first = docstring(path).splitlines()[0].rstrip(".")
        rows.append(f"| `experiments.{name}` | {first} | {own} |")
    return rows


def config_table() -> list[str]:
    """A row per config: its command, its first line."""
    rows = ["| config | of | sets up |", "|---|---|---|"]
    for name, path in configs().items():
        first = docstring(path).splitlines()[0].rstrip(".")
        rows.append(f"| `configs/{name}.py` | `{command_of(name)}` | {first} |")
    return rows


def filled(page: str) -> str:
    """The page with its tables as the sources have them."""
    for mark, table in (("commands", command_table()), ("configs", config_table())):
        start, end = f"<!-- {mark} -->\n", "<!-- end -->"
        before, _, rest = page.partition(start)
        page = before + start + "\n".join(table) + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
