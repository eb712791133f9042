"""Reads the cells of csv, tsv and parquet files: columns of text as it is written, or of numbers as they are stored."""

import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.sources.column_names import as_compared, number_among
from mpjax.errors import UsageError, first_line


Column = list[str] | np.ndarray
"""Cells: stripped texts, empty where there is none, or float64 numbers, NaN where there is none."""

SUFFIXES = (".csv", ".tsv", ".parquet")


@dataclasses.dataclass(frozen=True)
class Cells:
    """Rows of one or several files.

    Attributes:
      columns: the cells of each column.
      rows: the number of each row in its file, from 1; a line of names is not counted.
      files: the name of the file of each row.
      notes: how the files were read, for the user.
      dropped: the columns of the files that `config.drop` names.
    """

    columns: Mapping[str, Column]
    rows: np.ndarray
    files: Sequence[str]
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Names a row, as in `row 3 of wine.csv`."""
        return f"row {self.rows[index]} of {self.files[index]}"

    def chosen(self, indices: Sequence[int] | np.ndarray) -> "Cells":
        """The rows at `indices`, in their order."""
        columns = {
            name: cells[indices] if isinstance(cells, np.ndarray) else [cells[index] for index in indices]
            for name, cells in self.columns.items()
        }
        return Cells(columns, self.rows[indices], [self.files[index] for index in indices], self.notes)


def joined(parts: Sequence[Cells]) -> Cells:
    """Puts the rows of several files, which have the same columns, one after the other.

    Raises:
      UsageError: a column is text in one file, and numbers in another one, as parquet files may have it.
    """
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Column] = {}
    for name in parts[0].columns:
        cells = [part.columns[name] for part in parts]
        if len({isinstance(column, np.ndarray) for column in cells}) > 1:
            raise UsageError(f"column '{name}' is text in one file and numbers in another; store it alike in both")
        whole = np.concatenate(cells) if isinstance(cells[0], np.ndarray) else [cell for part in cells for cell in part]
        columns[name] = whole
    rows = np.concatenate([part.rows for part in parts])
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Cells(columns, rows, [file for part in parts for file in part.files], notes)


def quoted(names: Sequence[str]) -> str:
    """Names columns for a message, as in `'area', 'town'`."""
    return ", ".join(f"'{name}'" for name in names)


def read_cells(path: pathlib.Path, config: Data, wanted: Collection[str] = ()) -> Cells:
    """Reads the columns `wanted` of a csv, tsv or parquet file that has them; empty: all columns.

    Columns that `config.drop` names are left out. A file whose first line names all that is `wanted` has a line of
    names, whatever `config.header`. Rows without any cell are left out; of rows to predict only those at both ends,
    so that each row of the file has its place.

    Raises:
      UsageError: the file is of another kind, is not UTF-8, has no rows, has rows of several lengths or columns of one
        name, a column is neither numbers nor text, or the first line looks like an example.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise UsageError(f"{path}: wanted a file that ends in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")

    def is_read(name: str) -> bool:
        return name not in config.drop and (not wanted or name in wanted)

    if kind == ".parquet":
        if config.header and not wanted:
            raise UsageError(f"--data.header: {path} has the names of its columns; leave it out")
        if config.decimal:
            raise UsageError(f"--data.decimal {config.decimal}: {path} holds numbers, not their texts; leave it out")
        names, columns, notes = *_parquet(path, is_read), ()
    else:
        columns, notes = _delimited(path, kind, config.header, wanted)
        names = list(columns)
        columns = {name: cells for name, cells in columns.items() if is_read(name)}
    count = len(next(iter(columns.values()), ()))
    if not count:
        raise UsageError(f"{path}: there are no rows, or --data.drop leaves no column; wanted at least one of both")
    dropped = tuple(name for name in config.drop if name in names)
    return Cells(columns, np.arange(1, count + 1), [path.name] * count, notes, dropped)


# Commas come last: they may also be in the numbers of a file whose cells are separated by semicolons.
_SIGNS = {"tab": "\t", "semicolon": ";", "bar": "|", "comma": ","}


def _delimited(
    path: pathlib.Path, kind: str, header: Sequence[str], wanted: Collection[str]
) -> tuple[dict[str, Column], tuple[str, ...]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}; convert the file to UTF-8") from None
    sign = "tab" if kind == ".tsv" else _sign_of(text)
    try:
        reader = _reader(text, sign)
        lines = [(reader.line_num, line) for line in reader if _is_filled(line) or (wanted and len(line) > 1)]
    except csv.Error as error:
        raise UsageError(f"{path}: {error}; repair its quotes") from None
    filled = [at for at, (_, line) in enumerate(lines) if _is_filled(line)]
    lines = lines[filled[0] : filled[-1] + 1] if filled else []  # spreadsheets write empty rows behind the last one
    if not lines:
        raise UsageError(f"{path} is empty")
    first = [cell.strip() for cell in lines[0][1]]
    if wanted:
        header = _header_of(path, first, header, wanted)
    names = _names(path, first, header)
    rows = lines if header else lines[1:]
    for number, line in rows:
        if len(line) != len(names):
            raise UsageError(
                f"{path}: line {number} has {len(line)} cells, the first line {len(names)}, separated by a {sign}; "
                "wanted one number of cells in all lines"
            )
    columns: dict[str, Column] = {name: [line[at].strip() for _, line in rows] for at, name in enumerate(names)}
    usual = "tab" if kind == ".tsv" else "comma"
    return columns, () if sign == usual else (f"{path.name}: cells are separated by a {sign}",)


def _reader(text: str, sign: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=_SIGNS[sign], strict=True, skipinitialspace=True)


def _is_filled(line: Sequence[str]) -> bool:
    return any(map(str.strip, line))


def _sign_of(text: str) -> str:
    """Finds the sign between cells: the first of `_SIGNS` that divides the first 20 lines into equally many cells."""
    for sign in _SIGNS:
        try:
            counts = {len(line) for line in itertools.islice(_reader(text, sign), 20) if line}
        except csv.Error:
            continue
        if len(counts) == 1 and counts != {1}:
            return sign
    return "comma"


def _header_of(
    path: pathlib.Path, first: Sequence[str], header: Sequence[str], wanted: Collection[str]
) -> Sequence[str]:
    """Chooses the names of the columns of rows to predict: `header`, or none if the first line names all `wanted`.

    Raises:
      UsageError: with `header`, the first line gives only some names, or has another number of cells.
    """
    if {*wanted} <= {*first}:
        return ()
    if header and (len(header) != len(first) or sum(name in header for name in first) > 1):
        raise UsageError(
            f"{path}: the first line is {','.join(first)}; wanted one that names the columns {', '.join(wanted)}, or "
            f"an example with the columns of the run, {', '.join(header)}"
        )
    return header


def _names(path: pathlib.Path, first: Sequence[str], header: Sequence[str]) -> Sequence[str]:
    if header:
        if len(header) != len(first):
            raise UsageError(
                f"--data.header has {len(header)} names, but {path} has {len(first)} columns; wanted a name for each"
            )
        here = as_compared(first)
        if here == as_compared(header) or sum(name in here for name in as_compared(header)) > 1:
            raise UsageError(
                f"--data.header {' '.join(header)}: the first line of {path} has these names already, in "
                f"{'this' if here == as_compared(header) else 'another'} order; leave it out",
                repair={"data.header": ()},
            )
        return header
    if number := number_among(first):
        guess = tuple(f"column{at}" for at in range(1, len(first) + 1))
        raise UsageError(
            f"{path}: the first line gives the names of its columns, but {number!r} is a number, so that it looks like "
            f"an example; for a file without a line of names write a name for each column, as in --data.header "
            f"{' '.join(guess)}",
            repair={"data.header": guess},
        )
    if twice := [name for name in first if first.count(name) > 1]:
        raise UsageError(f"{path}: two columns are named {twice[0]!r}; wanted different names")
    return first


def _parquet(path: pathlib.Path, is_read: Callable[[str], bool]) -> tuple[list[str], dict[str, Column]]:
    """Reads the names of all columns, and the columns of which `is_read` is true."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{path}: reading parquet files needs pyarrow: pip install 'mpjax[hf]'") from error
    try:
        file = parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{path}: two columns are named {twice[0]!r}; wanted different names")
        table = file.read([name for name in names if is_read(name)])
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: {first_line(error)}") from error
    types: Any = pa.types
    columns: dict[str, Column] = {}
    for name, stored in zip(table.column_names, table.columns, strict=True):
        column = stored.cast(stored.type.value_type) if types.is_dictionary(stored.type) else stored
        kind = column.type
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
            values = column.to_pylist()
            numbers = [np.nan if value is None else float(value) for value in values]
            there = [(value, number) for value, number in zip(values, numbers, strict=True) if value is not None]
            if types.is_integer(kind) and any(int(number) != value for value, number in there):
                # As categories or classes, such integers differ, and in float64 they may be one number.
                columns[name] = ["" if value is None else str(value) for value in values]
            else:
                columns[name] = np.asarray(numbers, np.float64)
        elif types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind):
            columns[name] = ["" if value is None else value.strip() for value in column.to_pylist()]
        else:
            raise UsageError(
                f"{path}: column '{name}' is {kind}; wanted numbers or texts; store its parts as numbers, or write "
                f"--data.drop {name}"
            )
    return names, columns
