"""Opens csv, tsv and parquet files as rows of numbers and categories, with what is predicted from them."""

import difflib
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from mpjax.config.choices import TABULAR
from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.config.tasks import OF_ROWS, TaskName
from mpjax.data.cell_values import is_of_numbers
from mpjax.data.cells import SUFFIXES, Cells, joined, read_cells
from mpjax.data.encoded_rows import encoded, targets_of
from mpjax.data.encoding import Encoding, require_settings
from mpjax.data.examples import Source
from mpjax.data.fields import Field, Label
from mpjax.data.fitted_encoding import fitted
from mpjax.data.sources.own import ArrayRows
from mpjax.data.table import SplitPart, parts_of
from mpjax.data.targets import Labels, NumericTarget, Row
from mpjax.errors import AbsentData, UsageError


def open_tabular(where: str, task: TaskName, config: Data, stored: Encoding | None = None) -> Source:
    """Opens a file, whose only split is `train`, or a folder with a file for each split, such as `train.csv`.

    Files are read whole, and all rows are encoded now. The statistics are those of the training split, unless a run has
    stored them.

    Args:
      where: the path.
      task: classification, regression or multilabel.
      config: the splits and targets, and how cells are read.
      stored: the encoding of a run, by which all rows are encoded; None: it is found now.

    Raises:
      UsageError: there is no such file, split or column; a column cannot be an input as it is; a target is missing or
        does not suit the task; or `stored` is of other settings.
    """
    name = f"{TABULAR}{where}"
    if task not in OF_ROWS:
        raise UsageError(f"data set '{name}' has rows of a table: it supports {', '.join(OF_ROWS)}, not {task}")
    files = {split: read_cells(path, config) for split, path in _files(where, name).items()}
    sizes = {split: len(cells) for split, cells in files.items()}
    parts = [parts_of(expression, sizes, name) for expression in (config.train_split, config.test_split)]
    _require_columns(files, config)
    train, test = (
        joined([_rows(files[part.split], part, config) for part in half if part.start < part.stop]) for half in parts
    )
    notes = list(dict.fromkeys(train.notes + test.notes))
    if stored is None:
        _require_dropped(files, config)
        stored, told = fitted(train, _targets(train, task, config), task, config)
        notes += told
    else:
        require_settings(stored, task, config)
    if config.rows == "shuffled" and any(part.stop - part.start < sizes[part.split] for half in parts for part in half):
        notes.append(
            "a part of a file is of its rows in a fixed random order; for rows in the order of time write --data.rows "
            "stored"
        )
    # A row of a random part is found again in its file by the name that predict.py gives the rows of files.
    is_random = config.rows == "shuffled" and any(part.stop - part.start < sizes[part.split] for part in parts[1])
    places = [f"{file}[{row - 1}]" for file, row in zip(test.files, test.rows, strict=True)] if is_random else []
    fields: dict[str, Field] = {"row": Row(stored.inputs), **fields_of(stored)}
    train, test = (
        ArrayRows(
            {"row": encoded(stored, cells, config, f"split '{split}'"), **targets_of(stored, cells, config)},
        )
        for split, cells in ((config.train_split, train), (config.test_split, test))
    )
    return Source(name, fields, train, test, notes=tuple(notes), encoding=stored, places=places)


def _files(where: str, name: str) -> dict[str, pathlib.Path]:
    """Maps each split to its file."""
    path = expanded(where)
    if not path.is_dir():
        if not path.exists():
            raise AbsentData(f"data set '{name}': there is no file or folder {path.absolute()}")
        return {"train": path}
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise UsageError(f"data set '{name}': the folder has no file that ends in {', '.join(SUFFIXES)}")
    if twice := [file for file in files if [other.stem for other in files].count(file.stem) > 1]:
        raise UsageError(
            f"data set '{name}': {' and '.join(file.name for file in twice)} are one split; keep one of them"
        )
    return {file.stem: file for file in files}


def _require_columns(files: Mapping[str, Cells], config: Data) -> None:
    """Raises UsageError if files have different columns, or a setting names a column that they do not have."""
    (first, cells), *others = files.items()
    for split, other in others:
        if cells.columns.keys() != other.columns.keys():
            lacking = sorted(cells.columns.keys() ^ other.columns.keys())
            raise UsageError(
                f"the files of the splits '{first}' and '{split}' have different columns: only one of them has "
                f"{', '.join(lacking)}; wanted the same in all, or --data.drop {' '.join(lacking)}; rows without what "
                "is predicted are for predict.py"
            )
    for setting in ("targets", "categories"):
        for name in getattr(config, setting):
            if name not in cells.columns:
                raise _no_column(f"--data.{setting} {name}", name, cells.columns)


def _require_dropped(files: Mapping[str, Cells], config: Data) -> None:
    """Raises UsageError if `config.drop` names a column that no file has: with a typo, the column would be an input."""
    for name in config.drop:
        if not any(name in cells.dropped for cells in files.values()):
            columns = dict.fromkeys(column for cells in files.values() for column in (*cells.columns, *cells.dropped))
            raise _no_column(f"--data.drop {name}", name, columns)


def _no_column(where: str, name: str, columns: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(name, list(columns), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UsageError(f"{where}: there is no such column; the columns are {', '.join(columns)}{hint}")


_USUAL = {
    "classification": ("label", "class", "target"),
    "regression": ("target", "label", "y"),
    "multilabel": (),
}


def _targets(train: Cells, task: TaskName, config: Data) -> tuple[str, ...]:
    """Chooses the columns to predict: those of the settings, or else the only one with a usual name."""
    names = list(train.columns)
    if config.targets:
        if task == "classification" and len(config.targets) > 1:
            raise UsageError(
                f"--data.targets {' '.join(config.targets)}: a row has one class; for several labels of 0 and 1 write "
                "--task multilabel, for several numbers --task regression"
            )
        return config.targets
    usual = [name for name in names if name.lower() in _USUAL[task]]
    if len(usual) == 1:
        return (usual[0],)
    wanted = {"classification": "the class", "regression": "the number", "multilabel": "the labels"}[task]
    likely = [name for name in names if task == "classification" or is_of_numbers(train.columns[name], config)]
    example = f", as in --data.targets {likely[-1]}" if likely else ""
    raise UsageError(
        f"which column has {wanted} to predict? There are {', '.join(names)}; write --data.targets COLUMN{example}",
        repair={"data.targets": (likely[-1],)} if likely and task != "multilabel" else {},
    )


def _rows(cells: Cells, part: SplitPart, config: Data) -> Cells:
    """Takes a part of the rows of a file, which are shuffled before unless the part is the whole file."""
    if part.stop - part.start == len(cells):
        return cells
    order = np.arange(len(cells))
    if config.rows == "shuffled":
        order = np.argsort(_hashes(len(cells)), kind="stable")
    return cells.chosen(order[part.start : part.stop])


def _hashes(count: int) -> np.ndarray:
    """Hashes the numbers from 0 up, uint64 [count], the same in every version of NumPy (splitmix64)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fields_of(encoding: Encoding) -> dict[str, Field]:
    """The field that is predicted: `label`, `target` or `labels`."""
    if encoding.task == "regression":
        return {"target": NumericTarget(encoding.targets, encoding.mean, encoding.std)}
    if encoding.task == "multilabel":
        return {"labels": Labels(encoding.targets)}
    return {"label": Label(len(encoding.classes), names=encoding.classes)}
