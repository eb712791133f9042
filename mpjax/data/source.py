"""From the name of a data set to its examples."""

import dataclasses
import pathlib

from mpjax.config.schema import Data
from mpjax.config.task import TaskName
from mpjax.data import synthetic
from mpjax.data.examples import Source
from mpjax.data.table import Table
from mpjax.errors import UsageError


def open_source(config: Data, data_dir: pathlib.Path, task: TaskName = "classification") -> Source:
    """Opens the data set that `config.name` names, as the task wants it.

    Args:
      config: `name` is `digits`, `digits_canvas` or `docstrings` (written on first use), `synthetic:HxWxC:CLASSES`
        (generated), `folder:PATH` (images), `hf:PATH` or `hf:NAME` (Hugging Face datasets), or a tensorflow-datasets
        set prepared below `data_dir`: `name`, `name/config`, either with `/version`.
      data_dir: folder of prepared data sets.
      task: which fields an example is to have.

    Raises:
      UsageError: there is no such set, split, image or label, or it needs TensorFlow to read; the message says what
        is there and how to prepare what is not.
    """
    if config.name.partition(":")[0] == synthetic.NAME:
        if task != "classification":
            raise UsageError(
                f"data set '{config.name}' has images and labels only: it serves classification, not {task}"
            )
        # Two different batches are enough to try a configuration.
        return synthetic.parse_synthetic(config.name, size=2 * config.batch_size)
    from mpjax.data.task import as_task

    return as_task(_table(config, data_dir, task), task, config)


def _table(config: Data, data_dir: pathlib.Path, task: TaskName) -> Table:
    # Each library is imported only for its own sets: each takes seconds.
    kind, _, where = config.name.partition(":")
    if kind == "folder":
        from mpjax.data.folder import open_folder

        return open_folder(where, task, config)
    if kind == "hf":
        from mpjax.data.huggingface import open_huggingface

        return open_huggingface(where, config)
    from mpjax.data.prepared import open_prepared

    return open_prepared(dataclasses.replace(config, name=_written(config.name, data_dir)), data_dir)


def _written(name: str, data_dir: pathlib.Path) -> str:
    """Writes a set that needs no download; returns the name under which it is found."""
    if name == "digits":
        from mpjax.data.digits import prepare_digits

        prepare_digits(data_dir)
    elif name == "digits_canvas":
        from mpjax.data.digits_canvas import prepare_digits_canvas

        prepare_digits_canvas(data_dir)
    elif name == "docstrings":
        from mpjax.data.docstrings import prepare_docstrings

        return prepare_docstrings(data_dir)
    return name
