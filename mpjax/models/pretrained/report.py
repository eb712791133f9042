"""Reports loaded or exported weights, with one row for each variable of the model."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpjax import notebook


_LISTED = 4  # names


class WeightRow(NamedTuple):
    """A variable that was loaded, exported or skipped.

    Attributes:
      path: the path in the model, attribute names and indices joined by `/`.
      key: the key in the file; None for a skipped variable, which keeps its initial values.
      shape: the shape of the model's array.
      before: the dtype before the cast: the file's when loading, the model's when exporting.
      after: the dtype after the cast.
      overflow: the number of finite values that became inf.
      flushed: the number of nonzero values that became zero.
      error: the largest relative rounding error of all other values, as a fraction.
    """

    path: str
    key: str | None
    shape: tuple[int, ...]
    before: np.dtype
    after: np.dtype
    overflow: int = 0
    flushed: int = 0
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class PretrainedReport:
    """The dtypes of every variable, and what their casts lost. Prints as a table and iterates over its rows.

    Attributes:
      source: the path of the file or folder.
      layout: the name of the layout, such as "mpjax", "huggingface" or "timm".
      rows: one for each variable of the model.
      ignored: the keys of the file that were not read: unused by the model or skipped.
    """

    source: str
    layout: str
    rows: tuple[WeightRow, ...]
    ignored: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[WeightRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def skipped(self) -> tuple[str, ...]:
        """The paths of the variables that were not loaded and keep their initial values."""
        return tuple(row.path for row in self.rows if row.key is None)

    @property
    def overflow(self) -> int:
        """The number of finite values that became inf, over all variables."""
        return sum(row.overflow for row in self.rows)

    @property
    def flushed(self) -> int:
        """The number of nonzero values that became zero, over all variables."""
        return sum(row.flushed for row in self.rows)

    @property
    def error(self) -> float:
        """The largest relative rounding error over all variables, as a fraction; 0 without variables."""
        return max((row.error for row in self.rows), default=0.0)

    @property
    def totals(self) -> str:
        """One line: the number of variables and values, their dtypes, the losses, and the skipped variables."""
        moved = [row for row in self.rows if row.key is not None]
        numbers = sum(int(np.prod(row.shape)) for row in moved)
        turns = Counter(_turn(row) for row in moved)
        dtypes = ", ".join(f"{count} {turn}" for turn, count in turns.items()) or "none"
        return (
            f"{len(moved)} variables ({numbers:,} numbers) of {self.source}, {self.layout} layout: {dtypes}; "
            f"{self.overflow} overflow, {self.flushed} flush to zero, largest relative error {self.error:.2g}"
            + (f"; left at initial values: {_listed(self.skipped)}" if self.skipped else "")
        )

    def _notes(self) -> list[str]:
        ignored = [f"keys of the file that were not read: {_listed(self.ignored)}"] if self.ignored else []
        return [self.totals, *ignored]

    def _repr_html_(self) -> str:
        return notebook.block(notebook.table(_HEADS, map(_cells, self.rows)), notebook.paragraphs(self._notes()))

    _repr_pretty_ = notebook.as_text

    def __str__(self) -> str:
        cells = [_HEADS, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADS))]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([table[0], "  ".join("-" * width for width in widths), *table[1:], "", *self._notes()])


_HEADS = ("path", "key", "shape", "before", "after", "overflow", "flushed", "error")


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if names[_LISTED:] else ""
    return ", ".join(names[:_LISTED]) + more


def _turn(row: WeightRow) -> str:
    return f"{row.before}" if row.before == row.after else f"{row.before} to {row.after}"


def _cells(row: WeightRow) -> tuple[str, ...]:
    key = "(initial values)" if row.key is None else row.key
    shape = "x".join(map(str, row.shape)) or "scalar"
    error = f"{row.error:.1e}" if row.error else "0"
    return (row.path, key, shape, str(row.before), str(row.after), str(row.overflow), str(row.flushed), error)
