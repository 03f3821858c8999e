"""The index of faults in README.md names tests that are there."""

import ast
import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parent
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def names(text: str) -> list[tuple[str, str]]:
    """Every file and test that a text names."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text)


def absent(file: str, test: str) -> bool:
    path = FOLDER / file
    if not path.is_file():
        return True
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {own.id for own in node.targets if isinstance(own, ast.Name)}
    return not test.startswith("test_") or test not in found


def test_every_test_that_is_named_exists():
    assert [
        f"{file}::{name}" for file, name in names(INDEX) if absent(file, name)
    ] == []
    # Nothing that looks like a name escapes the pattern.
    assert len(names(INDEX)) == INDEX.count("::") - INDEX.count("`file::test`") > 150


def test_every_kind_has_a_test_or_a_reason():
    rows = [line for line in INDEX.splitlines() if line.startswith("| ")]
    kinds = [line for line in rows if line.split(" | ")[-1] != "test |"]
    assert len(kinds) > 100
    assert [line for line in kinds if len(line.split(" | ")) != 2] == []
    assert all(names(line) or len(line.split(" | ")[1].split()) > 4 for line in kinds)
    kit = INDEX.partition("## The smallest kit")[2].partition("\n## ")[0]
    assert (
        len([line for line in kit.splitlines() if names(line) and line[0] == "|"]) == 14
    )


@pytest.mark.parametrize("name", ["test_index.py::test_none", "none.py::test_x"])
def test_a_stale_name_is_found(name):
    assert absent(*name.split("::"))
