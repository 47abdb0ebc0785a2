"""The notebook runs from top to bottom, and its policy learns what its reward asks for."""

from pathlib import Path

import pytest

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are made here"
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    history = notebook.cells[-3].outputs[-1].text
    assert history.startswith("[0."), history
