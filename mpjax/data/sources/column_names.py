"""Checks the column names of csv and tsv files: is the first line one of names, or is it an example?"""

import collections
import warnings
from collections.abc import Sequence
from typing import Any

from mpjax.errors import DataWarning, UsageError


_LOOKED_AT = 10_000
"""The number of lines that are searched for values."""


def require_names(split: Any, header: Sequence[str]) -> None:
    """Checks `header`, the column names that the user gives, or without it the names in the first line.

    Args:
      split: a `datasets.Dataset` of a csv or tsv file; with `header`, its first row is the first line of the file.
      header: a name for each column of a file without a line of names. Empty: the first line has the names.

    Raises:
      UsageError: with `header`, the number of names differs from the number of columns, or the first line has names
        too (a DataWarning, if it only may have); without `header`, the first line looks like an example.
    """
    names = split.column_names
    if header:
        first = ["" if value is None else str(value) for value in split[0].values()]
        if len(header) != len(names):
            raise UsageError(
                f"--data.header {' '.join(header)} has {len(header)} names, but the file has {len(names)} columns, in "
                f"the first line {_shown(first)}; wanted a name for each"
            )
        if as_compared(first) == as_compared(header):
            raise UsageError(
                f"--data.header {' '.join(header)}: the first line of the file has these names already; leave it out",
                repair={"data.header": ()},
            )
        _require_example(split, first, header)
    elif reason := _like_an_example(split):
        guess = _guessed(split)
        raise UsageError(
            f"the first line of a csv or tsv file gives the names of its columns, but it is {_shown(names)}, which "
            f"looks like an example: {reason}; for a file without a line of names write a name for each column, as in "
            f"--data.header {' '.join(guess)}",
            repair={"data.header": guess},
        )


def as_compared(names: Sequence[str]) -> list[str]:
    """Converts column names to lower case without surrounding spaces, because two files may write them differently."""
    return [name.strip().lower() for name in names]


def _require_example(split: Any, first: Sequence[str], header: Sequence[str]) -> None:
    """Checks that the first line of a file is an example, and not a line of names, when the user gives `header`.

    The columns are compared with their first 10,000 values.

    Raises:
      UsageError: the line has several of the given names; or it has only words that occur nowhere else in their columns
        (`_like_names`), and all other values of one of the columns are numbers.

    Warns:
      DataWarning: it has only such words, and the values of one of the columns look like classes (`_of_few_values`).
    """
    prefix = f"--data.header {' '.join(header)}: the first line of the file is {_shown(first)}"
    names = as_compared(header)
    if sum(value in names for value in as_compared(first)) > 1:
        raise UsageError(
            f"{prefix}, which are names of columns already; leave it out and choose the columns by these names, with "
            "--data.columns where they are not the usual ones",
            repair={"data.header": ()},
        )
    lines = list(
        zip(*(split.data.column(name).slice(0, _LOOKED_AT).to_pylist() for name in split.column_names), strict=True)
    )
    # Several files in one split may each begin with the same names.
    examples = [line for line in lines if line != lines[0]]
    columns = [[str(line[at]) for line in examples if line[at] is not None] for at in range(len(first))]
    if not _like_names(first, columns):
        return
    for value, column in zip(first, columns, strict=True):
        numbers = [_is_number(other) for other in column]
        if value and len(numbers) > 1 and all(numbers):
            raise UsageError(
                f"{prefix}: '{value}' is not a number, and all others of its column are, so that it looks like a line "
                "of names; leave it out and choose the columns by these names, with --data.columns where they are not "
                "the usual ones; if the line is an example, repair or drop it",
                repair={"data.header": ()},
            )
    for value, column in zip(first, columns, strict=True):
        if value and _of_few_values(column):
            text = f"'{value}' is nowhere else in its column, whose other values come several times each"
            advice = "if the line gives names, leave --data.header out"
            warnings.warn(f"{prefix}, which is read as an example, but {text}; {advice}", DataWarning, stacklevel=2)
            return


def _like_names(first: Sequence[str], columns: Sequence[Sequence[str]]) -> bool:
    """True if each value of the first line has a letter, is no number, and does not occur again in its column.

    One value may be empty, if there are others. `columns` has the other values of each column.
    """
    words = [value for value in first if value]
    return len(words) >= max(1, len(first) - 1) and all(
        any(map(str.isalpha, value)) and not _is_number(value) and value not in column
        for value, column in zip(first, columns, strict=True)
        if value
    )


def _of_few_values(column: Sequence[str]) -> bool:
    """True if the values of a column look like classes, that is, each of a few values occurs several times.

    There are 10 values or more, each distinct value occurs at least twice, and at least five times on average.
    """
    counts = collections.Counter(column)
    return 10 <= len(column) >= 5 * len(counts) and min(counts.values()) > 1


def _like_an_example(split: Any) -> str:
    """Finds the reason why the column names of `split` look like an example; empty if they do not.

    One of the names is a number, or occurs more than once among the first 10,000 values of its column.
    """
    names = split.column_names
    if number := number_among(names):
        return f"{number!r} is a number"
    held = (name for name in names if split.data.column(name).slice(0, _LOOKED_AT).to_pylist().count(name) > 1)
    name = next(held, None)
    return "" if name is None else f"{name!r} is also a value in its column"


def number_among(names: Sequence[str]) -> str:
    """Finds the first name that is a number; empty if there is none, or if the names count the columns from 0 or 1."""
    numbers = [name for name in names if _is_number(name)]
    counts = ({*map(str, range(len(names)))}, {*map(str, range(1, len(names) + 1))})
    return numbers[0] if numbers and {*names} not in counts else ""


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _shown(names: Sequence[str]) -> str:
    cut = [name if len(name) <= 40 else f"{name[:40]}..." for name in names]
    return ",".join(cut[:8]) + (f" and {len(cut) - 8} more" if len(cut) > 8 else "")


def _guessed(split: Any) -> tuple[str, ...]:
    """Guesses a name for each column from its first 1,000 values, in the order of the columns.

    `text` is the column whose texts are longest in total, if there are texts. `label` is, of the others without floats,
    the one with the fewest distinct values. Any other column is `columnN`, where N is its position, from 1.
    """
    columns = {name: split.data.column(name).slice(0, 1000).to_pylist() for name in split.column_names}
    lengths = {name: sum(len(value) for value in values if isinstance(value, str)) for name, values in columns.items()}
    longest = max(columns, key=lambda name: lengths[name])
    others = {
        name: values
        for name, values in columns.items()
        if not (name == longest and lengths[name]) and not any(isinstance(value, float) for value in values)
    }
    label = min(others, key=lambda name: len({*others[name]}), default=None)
    meant = {longest: "text"} if lengths[longest] else {}
    if label is not None:
        meant[label] = "label"
    return tuple(meant.get(name, f"column{at}") for at, name in enumerate(columns, 1))
