"""Every notebook runs from top to bottom, and carries no outputs in git."""

from __future__ import annotations

import pathlib

import pytest

from specjax import zoo

COLAB = pathlib.Path(__file__).resolve().parents[2] / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    for cell in code:
        assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    assert zoo.names(), "no pair ships, so the notebooks have nothing to load"
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(COLAB.parent)}}
    )
    client.execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "tokens per target call" in printed
