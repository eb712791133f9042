"""The notebooks of docs/notebooks: they run from the top, and show what a run of them gives."""

import importlib.util
import pathlib
import re

import pytest


FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "notebooks"

pytestmark = pytest.mark.slow


def told(notebook):
    """What each cell prints, and the first line of what it shows, with `#` for every number."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.text if output.output_type == "stream" else output.data["text/plain"].splitlines()[0]
            yield cell.id, output.output_type, sorted(output.get("data", {})), re.sub(r"[\d.,:]*\d", "#", text)


@pytest.mark.filterwarnings("default:::(zmq|tornado|jupyter_client|nbclient|asyncio)")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_runs_and_shows_what_a_fresh_run_gives(file, monkeypatch, tmp_path):
    import nbformat

    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    fresh = execute.executed(file)  # a failed assertion of a cell is an error here
    assert list(told(nbformat.read(file, as_version=4))) == list(told(fresh)), "run docs/notebooks/execute.py"
    assert file.stat().st_size < 200_000


def test_the_story_has_ten_cells_and_no_output_is_an_error():
    import nbformat

    notebook = nbformat.read(FOLDER / "nan_to_repaired.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, 11))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    shown = "".join(output.data.get("text/html", "") for output in outputs if "data" in output)
    assert "verdict: overflow in energy (forward, square)" in shown
    assert "Cell In[2]:8" in shown
