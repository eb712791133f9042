"""Makes inputs and targets of the rows of a table by an encoding, that of the training split."""

import warnings

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.cell_values import category_of, numbers_of, texts_of
from mpjax.data.cells import Cells, quoted
from mpjax.data.encoding import Categories, Encoding, NumericColumn
from mpjax.data.target_cells import class_texts, target_numbers, zeros_and_ones
from mpjax.data.targets import NumericTarget
from mpjax.errors import DataWarning, UsageError


def require_inputs(encoding: Encoding, cells: Cells, called: str) -> None:
    """Raises UsageError if rows, called `called`, lack a column that is an input."""
    if missing := [column.name for column in encoding.columns if column.name not in cells.columns]:
        there = [column.name for column in encoding.columns if column.name in cells.columns]
        raise UsageError(
            f"{called}: there is no column {quoted(missing)}, which the model takes; of its columns there are "
            f"{quoted(there) or 'none'}"
        )


def encoded(encoding: Encoding, cells: Cells, config: Data, called: str) -> np.ndarray:
    """Computes the inputs of rows, float32 [N, F], from the statistics of the training split.

    Args:
      encoding: what each column becomes.
      cells: the rows, with all columns of the encoding.
      config: how numbers are written.
      called: the name of the rows, for warnings.

    Warns:
      DataWarning: rows have categories that no training row had, or lack numbers that no training row lacked.

    Raises:
      UsageError: a column is missing, a cell of a column of numbers is none, or a number is infinite in float32.
    """
    require_inputs(encoding, cells, called)
    blocks = []
    for column in encoding.columns:
        if isinstance(column, Categories):
            blocks.append(_one_hot(column, cells, called))
        else:
            blocks.append(_standardised(column, cells, config, called))
    return np.concatenate(blocks, axis=1)


def _one_hot(column: Categories, cells: Cells, called: str) -> np.ndarray:
    """Computes an input for each category, float32 [N, K]."""
    texts = texts_of(cells.columns[column.name])
    numbers = {value: at for at, value in enumerate(column.values)}
    places = np.asarray([numbers.get(text, numbers.get(category_of(text), -1)) for text in texts])
    if unseen := sorted({text for text, at in zip(texts, places, strict=True) if at < 0}):
        _warn(
            f"{called}: column '{column.name}' has {', '.join(map(repr, unseen[:5]))} in "
            f"{np.count_nonzero(places < 0)} of {len(texts)} rows, which no training row has: all its inputs are 0 "
            "there"
        )
    return np.equal(places[:, None], np.arange(len(column.values))).astype(np.float32)


def _standardised(column: NumericColumn, cells: Cells, config: Data, called: str) -> np.ndarray:
    """Computes standardised numbers, float32 [N, 1], or [N, 2] with where they are missing."""
    values = numbers_of(cells, column.name, config)
    absent = np.isnan(values)
    if absent.any() and not column.marked:
        _warn(
            f"{called}: column '{column.name}' is missing in {np.count_nonzero(absent)} of {len(values)} rows, and in "
            f"no training row: it is taken for the mean, {column.mean:.6g}"
        )
    with np.errstate(over="ignore"):
        scaled = ((np.where(absent, column.mean, values) - column.mean) / column.std).astype(np.float32)
    if (infinite := np.flatnonzero(np.isinf(scaled))).size:
        at = int(infinite[0])
        raise UsageError(
            f"column '{column.name}' is {values[at]:g} in {cells.place(at)}, too far from the mean of the training "
            f"split, {column.mean:g}, with a deviation of {column.std:g}"
        )
    return np.stack([scaled, absent], 1).astype(np.float32) if column.marked else scaled[:, None]


def targets_of(encoding: Encoding, cells: Cells, config: Data) -> dict[str, np.ndarray]:
    """Reads what is predicted: `label` int32 [N], `target` float32 [N, K] standardised, or `labels` int32 [N, K].

    Raises:
      UsageError: a cell is empty, no number, neither 0 nor 1, or a class that no training row has.
    """
    if encoding.task == "regression":
        numbers = np.stack([target_numbers(cells, name, config) for name in encoding.targets], axis=1)
        return {"target": NumericTarget(encoding.targets, encoding.mean, encoding.std).standardised(numbers)}
    if encoding.task == "multilabel":
        return {"labels": np.stack([zeros_and_ones(cells, name) for name in encoding.targets], axis=1)}
    (name,), numbers = encoding.targets, {text: number for number, text in enumerate(encoding.classes)}
    texts = class_texts(cells, name, config)
    if unseen := [at for at, text in enumerate(texts) if text not in numbers]:
        raise UsageError(
            f"label '{name}' is {texts[unseen[0]]!r} in {cells.place(unseen[0])}, a class that no training row has "
            f"(they have {', '.join(encoding.classes[:8])}), in {len(unseen)} rows; drop them, or write a "
            "--data.train_split that has the class"
        )
    return {"label": np.asarray([numbers[text] for text in texts], np.int32)}


def _warn(text: str) -> None:
    warnings.warn(text, DataWarning, stacklevel=4)  # the caller of `encoded`
