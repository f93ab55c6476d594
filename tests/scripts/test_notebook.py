"""The notebook runs, and the page of the documentation has its text and code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"
# Short trainings; the lengths are in the notebook's second cell.
SHORT = {"NOTEBOOK_TIMESTEPS": "2048", "NOTEBOOK_TRIALS": "2", "NOTEBOOK_EPISODES": "1"}


@pytest.mark.slow
@pytest.mark.integration
def test_notebook_runs(tmp_path, monkeypatch):
    """Every cell runs, and the file that is exported acts: its episode has a return."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("onnxruntime")
    for name, value in {**SHORT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    # A kernel of the user may be that of another environment.
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    # In a process of its own: nbclient leaves handlers of signals behind.
    command = [sys.executable, "-c", "from nbclient.cli import main; main()", "--timeout=120", "--inplace", NOTEBOOK.name]
    shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "Return of the file: " in printed
    files = {path.name for path in tmp_path.iterdir()}
    assert {"policy.onnx", "mountain_car.zip", "run.png"} <= files
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))


def test_notebook_is_clean():
    """The notebook is saved without outputs, begins with its installation, and is valid."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    assert "%pip install" in cells[0].source
    assert all(name in cells[1].source for name in SHORT)


@pytest.mark.integration
def test_page_has_the_code_of_the_notebook():
    """After a change of the notebook, `python scripts/render_notebook.py` makes the page again."""
    pytest.importorskip("nbformat")
    command = [sys.executable, str(ROOT / "scripts" / "render_notebook.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
