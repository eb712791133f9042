"""Executes the notebooks of this folder and stores their outputs in them.

    python docs/notebooks/execute.py

The documentation shows the stored outputs. `tests/docs/test_notebooks.py` executes them too, and compares the texts.
"""

import pathlib
import tempfile
from typing import Any

import nbformat
from nbclient import NotebookClient


HERE = pathlib.Path(__file__).parent


def executed(path: pathlib.Path) -> Any:
    """Returns a notebook with the outputs of a fresh execution in an empty folder.

    Raises:
      CellExecutionError: a cell failed; the message has its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": folder}})
        client.execute()
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}  # without the version of Python
    return notebook


if __name__ == "__main__":
    for file in sorted(HERE.glob("*.ipynb")):
        nbformat.write(executed(file), file)
        print(f"{file.name}: outputs stored")
