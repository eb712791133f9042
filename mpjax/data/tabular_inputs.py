"""Reads rows of csv, tsv and parquet files as inputs to a trained model."""

from collections.abc import Sequence
from typing import Any

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.cells import Cells, joined, read_cells
from mpjax.data.encoded_rows import encoded, require_inputs
from mpjax.data.encoding import Encoding
from mpjax.data.given import Inputs, files_of
from mpjax.data.stacking import Arrays
from mpjax.errors import UsageError


def given_rows(inputs: Sequence[str], encoding: Encoding, config: Data) -> Inputs:
    """Reads all rows into memory now, and encodes them by the statistics of a run.

    Files need the columns that are inputs; others are not read. A row is named `FILE[0]` and so on.

    Args:
      inputs: paths of files, folders and quoted globs; see `files_of`.
      encoding: what the columns of the run became.
      config: how cells are read.

    Raises:
      UsageError: a file does not exist or cannot be read, or lacks a column. When a row is read: a cell is not what its
        column has.

    Warns:
      DataWarning: see `encoded`.
    """
    wanted = [column.name for column in encoding.columns]
    parts: list[tuple[str, Cells]] = [
        (path, read_cells(expanded(path), config, wanted)) for given in inputs for path in files_of(given)
    ]
    names = [f"{path}[{row}]" for path, cells in parts for row in range(len(cells))]
    for path, cells in parts:  # before files are joined, so that the message names the file
        require_inputs(encoding, cells, path)
    cells, called = joined([cells for _, cells in parts]), " ".join(inputs)
    try:
        rows: Any = encoded(encoding, cells, config, called)
    except UsageError:  # told of the row that it is about, when that is read
        rows = None

    def encoded_row(position: int) -> Arrays:
        if rows is not None:
            return {"row": rows[[position]]}
        try:
            return {"row": encoded(encoding, cells.chosen([position]), config, called)}
        except UsageError as error:
            fact = str(error).partition("; wanted a number")[0]  # without the settings, which are those of the run
            sign = repr(config.decimal or ".")
            raise UsageError(f"{fact}; the run reads numbers with the decimal sign {sign}; repair the cell") from error

    return Inputs(names, list, encoded_row)
