"""Numbers the classes of a column of labels that is held in memory: integers, booleans or names of classes."""

from collections.abc import Callable, Sequence

import numpy as np

from mpjax.data.fields import Label
from mpjax.data.table import whole_numbers
from mpjax.errors import UsageError


Numbered = Callable[[np.ndarray], np.ndarray]
"""A function from stored labels to class numbers of the same shape."""


def classes_of(splits: Sequence[np.ndarray], column: str, where: str, ignored: Sequence[int]) -> tuple[Label, Numbered]:
    """Finds the classes of a column, and the function that numbers its values, alike in all splits.

    Integers are class numbers already: there are as many classes as the largest number of all splits, plus 1. The
    numbers `ignored` do not count, and a negative one is an error only when it is read. Booleans are the classes 0 and
    1. Texts are the names of classes, numbered in sorted order over `splits`; the function
    raises UsageError for any other text.

    Args:
      splits: the values of each split, [N]; bytes are UTF-8.
      column: the name of the column.
      where: the file of the column, for messages.
      ignored: integers that stand for no class.

    Raises:
      UsageError: no integer is a class number, a text is empty or not UTF-8, or the values are neither integers,
        booleans nor text.
    """
    called = f"label (column '{column}' of '{where}')"
    kinds = {values.dtype.kind for values in splits}
    if kinds == {"b"}:
        return Label(2), lambda values: values.astype(np.int32)
    if kinds <= {"i", "u"}:
        known = [values[~np.isin(values, ignored) & (values >= 0)] for values in splits]
        largest = max((int(values.max()) for values in known if values.size), default=-1)
        if largest < 0:
            raise UsageError(f"{called}: no value is a class number; wanted integers from 0; is the set labelled?")
        return Label(largest + 1), lambda values: values
    if kinds <= {"S", "U"}:
        names = np.unique(np.concatenate([_decoded(values, called) for values in splits]))
        if "" in names:
            raise UsageError(
                f"{called}: some texts are empty; wanted the name of a class in every example; drop or fill these"
            )

        def numbers(values: np.ndarray) -> np.ndarray:
            texts = _decoded(values, called)
            if (unknown := ~np.isin(texts, names)).any():
                raise UsageError(
                    f"{called}: '{texts[unknown][0]}' is no class of the training split; its classes are "
                    f"{', '.join(names[:20])}; wanted the same classes in both splits"
                )
            return np.searchsorted(names, texts)

        return Label(len(names), names=tuple(map(str, names))), numbers
    stored = " and ".join(sorted({str(values.dtype) for values in splits}))
    raise UsageError(f"{called}: dtype {stored}; wanted class numbers, integers or text; {whole_numbers(column)}")


def _decoded(values: np.ndarray, called: str) -> np.ndarray:
    if values.dtype.kind == "U":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{called}: not UTF-8: {error}; convert the data to UTF-8") from error
