"""Reads what the cells of a column mean: numbers, missing ones, texts and categories."""

import re
from collections.abc import Callable, Iterable

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.cells import Cells, Column
from mpjax.errors import UsageError


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SEPARATED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?|[+-]?\d{1,3}(\.\d{3})+(,\d*)?|[+-]?\d*[,]\d+")
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


def is_number(cell: str) -> bool:
    """True if a cell is a number by itself, whatever the settings: one with a decimal point or none, such as -1.5e3."""
    return bool(_NUMBER.fullmatch(cell))


def is_float(cell: str) -> bool:
    """True if a cell is a number written with a decimal point or an exponent: 1.0 and 1e0, but not 1."""
    return is_number(cell) and not {*cell}.isdisjoint(".eE")


def looks_like_number(cell: str) -> bool:
    """True if a cell is a number in some way of writing: also with a comma, or with thousands separated."""
    return bool(_SEPARATED.fullmatch(cell)) or is_number(cell)


def missing_words(config: Data) -> set[str]:
    """The words that mean a missing number, in lower case."""
    return _MISSING | {word.lower() for word in config.missing}


def parsed(cells: Iterable[str], config: Data) -> list[float | None]:
    """Reads the number of each cell, float64: NaN if it is missing, None if the cell is no number."""
    return list(map(_parser(config), cells))


def _parser(config: Data) -> Callable[[str], float | None]:
    missing = missing_words(config)
    thousands = {".": ",", ",": ".", "": ""}[config.decimal]
    # No thousands begin with 0: 0,125 is a fraction in another way of writing.
    grouped = re.compile(rf"[+-]?[1-9]\d{{0,2}}({re.escape(thousands)}\d{{3}})+(?!\d)") if thousands else None

    def number(cell: str) -> float | None:
        if cell.lower() in missing:
            return np.nan
        if grouped:
            if thousands in cell:
                if not (groups := grouped.match(cell)) or thousands in cell[groups.end() :]:
                    return None
                cell = cell.replace(thousands, "")
            if config.decimal == ",":
                cell = cell.replace(",", ".") if "." not in cell else "-"
        return float(cell) if is_number(cell) else None

    return number


def is_of_numbers(column: Column, config: Data) -> bool:
    """True if all cells of a column are numbers or missing."""
    return isinstance(column, np.ndarray) or None not in parsed(column, config)


def numbers_of(cells: Cells, name: str, config: Data) -> np.ndarray:
    """Reads a column as numbers, float64 [N], NaN where one is missing.

    Raises:
      UsageError: a cell is no number, or no finite one in float64; the message names its row.
    """
    column = cells.columns[name]
    if not isinstance(column, np.ndarray):
        numbers = parsed(column, config)
        if None in numbers:
            at = numbers.index(None)
            raise UsageError(
                f"column '{name}' has {column[at]!r} in {cells.place(at)}; {advice_on(column[at])}",
                repair=repair_of(column[at]),
            )
        column = np.asarray(numbers, np.float64)
    if stated := [float(word) for word in config.missing if is_number(word)]:
        column = np.where(np.isin(column, stated), np.nan, column)  # -999 is also -999.0, and stored as a number
    if (infinite := np.flatnonzero(np.isinf(column))).size:
        raise UsageError(f"column '{name}' is infinite in {cells.place(int(infinite[0]))}; wanted finite numbers")
    return column


def advice_on(cell: str) -> str:
    """Formats what to do about a cell that is no number under the settings."""
    if _SEPARATED.fullmatch(cell):
        return (
            "wanted a number such as 1234.5; if its decimal sign is a point and commas separate thousands, write "
            "--data.decimal . and if it is a comma, --data.decimal ,"
        )
    if is_number(cell):  # only with --data.decimal ,
        return "wanted a number whose decimal sign is a comma, as --data.decimal , says; write one sign in all columns"
    return f"wanted a number; if it means a missing one, write --data.missing {cell!r}; repair it otherwise"


def repair_of(cell: str) -> dict[str, str]:
    """The setting with which a cell is a number, if only one of the two can be meant: 3,14 is never thousands."""
    return {"data.decimal": ","} if re.fullmatch(r"[+-]?(\d*,(\d{1,2}|\d{4,})|0?,\d+)", cell) else {}


def texts_of(column: Column) -> list[str]:
    """The cells of a column as texts: a stored whole number without a fraction, a missing one as an empty text."""
    if not isinstance(column, np.ndarray):
        return column
    return ["" if np.isnan(x) else str(int(x)) if float(x).is_integer() else repr(float(x)) for x in column]


def category_of(text: str) -> str:
    """The category of a cell: 1.0 and 1e0 are 1, as where numbers are stored; 01 and 1.10 are what they say."""
    if not is_float(text) or not abs(number := float(text)) < 2**53:
        return text
    return str(int(number)) if number.is_integer() else text


def in_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Sorts different texts, each once: numbers by value, and behind them the others."""
    return tuple(sorted(set(texts), key=lambda text: (0, float(text), text) if is_number(text) else (1, 0.0, text)))
