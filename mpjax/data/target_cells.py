"""Reads what is to be predicted from the cells of rows: classes, numbers, labels of 0 and 1."""

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.cell_values import is_float, is_number, missing_words, numbers_of, texts_of
from mpjax.data.cells import Cells
from mpjax.errors import UsageError


def class_texts(cells: Cells, name: str, config: Data) -> list[str]:
    """Reads the label of each row as text: 1, 1.0 and 1e0 are one class.

    Raises:
      UsageError: a label is missing, which the words of `config.missing` mean, and NA and the like beside whole numbers
        alone; or it is a number with a fraction.
    """
    texts = texts_of(cells.columns[name])
    stated = {word.lower() for word in config.missing}
    if gaps := [at for at, text in enumerate(texts) if text.lower() in stated]:
        raise UsageError(
            f"label '{name}' is {texts[gaps[0]]!r} in {cells.place(gaps[0])}, which --data.missing says is a missing "
            f"one, in {len(gaps)} of {len(texts)} rows: drop these rows from the file, or give the class another name "
            "if it is one"
        )
    words = missing_words(config) - {""}
    absent = [at for at, text in enumerate(texts) if text.lower() in words and not is_number(text)]
    others = {*texts} - {texts[at] for at in absent} - {""}
    if absent and others and all(map(is_number, others)):
        raise UsageError(
            f"label '{name}' is {texts[absent[0]]!r} in {cells.place(absent[0])}, and a number in others, so that it "
            f"means a missing one, in {len(absent)} of {len(texts)} rows: drop these rows from the file, or give the "
            "class another name if it is one"
        )
    if "" in texts:
        raise UsageError(
            f"label '{name}' is empty in {cells.place(texts.index(''))}, {texts.count('')} of {len(texts)} rows; "
            "wanted a class in every row: drop these rows from the file"
        )
    if not all(map(is_number, texts)) or not any(map(is_float, texts)):
        return list(texts)
    fractions = [at for at, text in enumerate(texts) if not float(text).is_integer()]
    if fractions:
        raise UsageError(
            f"label '{name}' is {texts[fractions[0]]} in {cells.place(fractions[0])}, which is no class; to predict "
            "numbers write --task regression",
            repair={"task": "regression"},
        )
    return [str(int(float(text))) for text in texts]


def target_numbers(cells: Cells, name: str, config: Data) -> np.ndarray:
    """Reads a target of a regression, float64 [N].

    Raises:
      UsageError: a cell is empty or no number.
    """
    try:
        values = numbers_of(cells, name, config)
    except UsageError as error:
        raise UsageError(
            f"--task regression: {error}; if '{name}' has classes, write --task classification", repair=error.repair
        ) from error
    if (missing := np.flatnonzero(np.isnan(values))).size:
        raise UsageError(
            f"target '{name}' is missing in {cells.place(int(missing[0]))}, {missing.size} of {len(values)} rows; "
            "wanted a number in every row: drop these rows from the file"
        )
    return values


_TRUTH = {"0": 0, "1": 1, "false": 0, "true": 1, "0.0": 0, "1.0": 1}


def zeros_and_ones(cells: Cells, name: str) -> np.ndarray:
    """Reads one of several labels, int32 [N]: 1, 1.0 and true, or 0, 0.0 and false.

    Raises:
      UsageError: a cell is something else.
    """
    texts = texts_of(cells.columns[name])
    values = [_TRUTH.get(text.lower(), -1) for text in texts]
    if -1 in values:
        at = values.index(-1)
        raise UsageError(
            f"--task multilabel: label '{name}' is {texts[at]!r} in {cells.place(at)}; wanted 0 or 1 (or false and "
            "true) in every row, and a column for each label; for a column of classes write --task classification"
        )
    return np.asarray(values, np.int32)
