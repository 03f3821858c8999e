"""Every notebook runs from top to bottom, and carries no outputs in git."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
from typing import Any

import pytest

from specjax import zoo

COLAB = pathlib.Path(__file__).resolve().parents[2] / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))

# What each must have shown: in words, by how many pictures, by how many decodes.
SHOWN: dict[str, tuple[list[str], int, int]] = {
    "quickstart": (
        [
            r"greedy: tokens per target call \d\.\d\d, accepted / drafted 0\.\d\d,",
            r"gamma 1: .*x measured, .*x predicted, c .*, v ",
            r"gamma 7: ",
            r"Dieses Paket enthält die Dokumentation",
        ],
        5,
        3,
    ),
    "write_a_drafter": (
        [
            r"my drafter, token rule: p = .*: lossless",
            r"my rule, model drafts: p = .*: lossless",
            r"my rule, my drafter: p = .*: lossless",
            r"wrong drafter: p = .*do not follow the target's law",
            r"wrong rule: p = .*do not follow the target's law",
            r"both wrong twins were rejected",
            r"Successor: tokens per target call [1-9]",
        ],
        0,
        1,
    ),
    "t5_xxl": (
        [
            r"float32, gamma \(2, 5\), 2 texts one at a time",
            r"target small: 77 M parameters; draft: 1 M parameters",
            r"2 of 2 texts are what the target writes alone",
            r"gamma 5: .*x measured, .*x predicted",
            r"The paper, T5-XXL on a TPU v4: 3\.4x with gamma 7",
        ],
        2,
        1,
    ),
}

of_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: pathlib.Path) -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_known():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@of_each
def test_is_committed_without_outputs(path):
    code = code_of(read(path))
    assert code
    for cell in code:
        assert cell.outputs == [] and cell.execution_count is None


@of_each
def test_a_tpu_is_preselected(path):
    metadata = read(path).metadata
    assert metadata.accelerator == "TPU"
    assert re.fullmatch("V[56]E1", metadata.colab.gpuType)
    assert metadata.colab.name == path.name


@of_each
@pytest.mark.parametrize("jax", [True, False])
def test_installing_leaves_the_jax_that_is_here(path, jax, monkeypatch):
    """The cell that a fresh Colab runs, which must come before any import."""
    IPython = pytest.importorskip("IPython")
    first = code_of(read(path))[0].source
    cell = IPython.core.inputtransformer2.TransformerManager().transform_cell(first)
    found = {"jax", "jaxlib"} if jax else set()
    installed: list[str] = []

    class Shell:
        def run_line_magic(self, name: str, line: str) -> None:
            installed.append(f"{name} {line}".format(**names))

    names: dict[str, Any] = {"get_ipython": Shell}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if name in found else None
    )
    exec(cell, names)
    pins = [f"{own}=={importlib.metadata.version(own)}" for own in ("jax", "jaxlib")]
    wanted = " ".join(pins) if jax else ""
    assert installed == [f'pip install -q "specjax[plots]" {wanted}']
    # Where specjax is there, nothing is installed.
    monkeypatch.setattr(importlib.util, "find_spec", find)
    exec(cell, names)
    assert len(installed) == 1
    # Whatever is replaced by pip must not be in use.
    assert not re.search(r"^\s*(import|from) (?!importlib)", first, re.MULTILINE)


@pytest.mark.slow
@of_each
def test_runs_from_top_to_bottom(path):
    nbclient = pytest.importorskip("nbclient")
    assert zoo.names(), "no pair ships, so the notebooks have nothing to load"
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(COLAB.parent)}}
    )
    client.execute()
    outputs = [own for cell in code_of(notebook) for own in cell.outputs]
    printed = "".join(own.get("text", "") for own in outputs)
    data = [own.get("data", {}) for own in outputs]
    words, pictures, decodes = SHOWN[path.stem]
    for pattern in words:
        assert re.search(pattern, printed), (pattern, printed)
    assert sum("image/png" in own for own in data) == pictures
    html = [own["text/html"] for own in data if "text/html" in own]
    assert sum("sj-accepted" in own for own in html) == decodes
    # The first thing that is shown: where it runs, and the alarm that it is a CPU.
    assert "NO TPU AND NO GPU" in html[0] and "jax" in html[0]
