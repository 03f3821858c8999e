"""The pages of `docs/` say nothing of the code that it does not have."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import ml_collections
import pytest

import specjax

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {name: (ROOT / "docs" / name, text) for name, text in DOCS.items()} | {
    name: (ROOT / name, (ROOT / name).read_text())
    for name in ("README.md", "CONTRIBUTING.md")
}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"`((?:specjax|experiments|configs|tests|docs|colab)/[\w./]*|[\w-]+\.(?:md|cff))`"
)


@functools.cache
def tables() -> Any:
    """The script that makes the tables; `docs` is no package to import it from."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str, *kinds: str) -> list[str]:
    """The fenced blocks of some kinds."""
    return [code for kind, code in _FENCE.findall(text) if kind in kinds]


@functools.cache
def settings(config: str) -> ml_collections.ConfigDict:
    """The settings of ``configs/NAME.py`` or ``configs/NAME.py:VARIANT``."""
    name, _, variant = config.partition(":")
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    return module.get_config(*([variant] if variant else []))


def flattened(config: ml_collections.ConfigDict, path: str = "") -> Iterator[tuple]:
    """Every setting by its full name."""
    for name in config:
        if isinstance(config[name], ml_collections.ConfigDict):
            yield from flattened(config[name], f"{path}{name}.")
        else:
            yield path + name, config[name]


def command_faults(text: str) -> list[str]:
    """What the commands of a shell text name that is not there."""
    found = []
    text = re.sub(r"\\\n\s*", "", text)
    for name, value in re.findall(r'^\s*(\w+)="(.*)"$', text, re.MULTILINE):
        text = text.replace(f'{name}="{value}"', "").replace(f"${name} ", f"{value} ")
    for line in text.splitlines():
        if "python -m experiments." not in line:
            continue
        # In prose a command ends with its backtick.
        line = "python -m" + line.partition("python -m")[2].partition("`")[0]
        words = shlex.split(line.partition(" [--")[0], comments=True)
        module = words[2]
        command = module.removeprefix("experiments.")
        if command not in tables().commands():
            found.append(f"no command {module}")
            continue
        given = dict(w[2:].partition("=")[::2] for w in words if w.startswith("--"))
        source, known = tables().commands()[command], tables().flags(command)
        if "command.run(" in source.read_text():  # else its flags are its own alone
            known, config = [*known, "workdir"], given.pop("config", "")
            if not (ROOT / config.partition(":")[0]).is_file():
                found.append(f"no config {config!r}")
                continue
            known += [f"config.{name}" for name, _ in flattened(settings(config))]
        found += [f"{command} has no --{flag}" for flag in given if flag not in known]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_is_there(page):
    text = PAGES[page][1]
    cells = re.findall(r"`(python -m experiments\.[a-z][^`]*)`", text)
    assert command_faults("\n".join([*blocks(text, "", "bash", "sh"), *cells])) == []


@pytest.mark.parametrize("config", sorted(tables().configs()))
def test_docstrings_of_configs_name_what_is_there(config):
    assert command_faults(tables().docstring(tables().configs()[config])) == []
    assert tables().command_of(config) in tables().commands()


@pytest.mark.parametrize(
    "line",
    [
        "python -m experiments.nothing --config=configs/demo.py",
        "python -m experiments.decode --config=configs/nothing.py",
        "python -m experiments.decode --config=configs/demo.py --config.nothing=1",
        "python -m experiments.decode --config=configs/demo.py --fast",
    ],
)
def test_a_planted_command_is_found(line):
    assert len(command_faults(line)) == 1
    assert command_faults("python -m experiments.decode --config=configs/demo.py") == []


def test_tables_are_those_of_the_sources():
    page = DOCS["commands.md"]
    assert tables().filled(page) == page, "run: python docs/tables.py"
    assert tables().filled(page.replace("| `configs/demo.py` |", "|")) == page


def test_settings_of_a_decode_are_all_told_with_their_values():
    def shown(value: Any) -> str:
        if value is None:
            return "unset"
        words = value if isinstance(value, tuple) else (value,)
        text = ",".join(map(str, words)).removeprefix(f"{ROOT}/")
        return f"`{text}`" if text else "empty"

    known = {n: shown(v) for n, v in flattened(settings("configs/demo.py"))}
    told = dict(
        re.findall(r"^\| `([\w.]+)` \| (.+?) \| ", DOCS["settings.md"], re.MULTILINE)
    )
    assert told == known


@pytest.mark.parametrize("page", PAGES)
def test_python_parses_and_names_what_specjax_has(page):
    for code in blocks(PAGES[page][1], "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "specjax":
                    assert hasattr(specjax, node.attr), node.attr
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):  # then it is a module
                        importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.parametrize("page", [n for n, text in DOCS.items() if ">>>" in text])
def test_examples_of_pages_run(page):
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    code = "\n".join(blocks(DOCS[page], "pycon"))
    runner.run(parser.get_doctest(code, {}, page, None, 0))
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries == DOCS[page].count(">>> ")


@pytest.mark.parametrize(
    "path",
    [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "specjax").rglob("*.py"))
        if ">>> " in path.read_text()
    ],
)
def test_examples_of_docstrings_run(path):
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


def anchors(text: str) -> set[str]:
    """Of the headings, as the pages are built with them."""
    outside = _FENCE.sub("", text)
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in words}


def link_faults(path: pathlib.Path, text: str) -> list[str]:
    """Links within the repository that lead nowhere."""
    found = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        other = path.parent / name if name else path
        if not other.exists():
            found.append(link)
        elif anchor and anchor not in anchors(other.read_text()):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    path, text = PAGES[page]
    assert link_faults(path, text) == []
    if page in DOCS:
        named = [n for n in _PATH.findall(text) if n not in ("configs/FILE.py",)]
        assert [n for n in named if not (ROOT / n).exists()] == []


def test_a_planted_link_is_found():
    page = ROOT / "docs" / "index.md"
    for link in ("nothing.md", "#nothing", "faq.md#nothing"):
        assert link_faults(page, f"[x]({link})") == [link]
    assert link_faults(page, "[x](faq.md#can-i-stream)") == []


def test_every_page_has_its_place():
    listed = re.findall(r"^  - (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(DOCS)


def test_the_map_has_all_that_stands_at_the_top():
    names = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "specjax").iterdir()
        if path.suffix == ".py" or (path.is_dir() and not path.name.startswith("_"))
    } - {"__init__.py"}
    top = DOCS["map.md"].partition("## At the top")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w./]+)`", top, re.M)) == names


def test_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {specjax.__version__}\n" in text
    assert "\nlicense: Apache-2.0\n" in text
