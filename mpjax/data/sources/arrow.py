"""Converts Arrow columns to NumPy arrays of the stored dtypes, which Python lists would lose."""

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from mpjax.errors import UsageError


pc: Any = compute  # pyarrow creates its functions at import, so type checkers do not see them


def numbers(column: Any, called: str) -> np.ndarray:
    """Converts a column of numbers or bools, or of nested lists of them of one shape, to an array [N, ...].

    The dtype is the stored one.

    Args:
      column: a pyarrow array, chunked or not, of N rows.
      called: the name of the column in error messages.

    Raises:
      UsageError: a value or list is missing (null), the lists differ in length, or the values are not numbers or bools.
    """
    rows = len(column)
    column, shape = flat(column), []
    while _is_list(column.type):
        require_all(column, called)
        bounds = pc.min_max(pc.list_value_length(column)).as_py() if len(column) else {"min": 0, "max": 0}
        if bounds["min"] != bounds["max"]:
            raise UsageError(
                f"{called}: lists of {bounds['min']} to {bounds['max']} values; wanted lists of equal length; "
                "pad or cut them"
            )
        shape.append(bounds["min"])
        column = flat(column.flatten())
    require_all(column, called)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise UsageError(f"{called}: {column.type}; wanted numbers")
    return column.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def flat(column: Any) -> Any:
    """Merges the chunks of a column, and converts an extension type, such as `datasets.Array3D`, to plain Arrow."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return column.storage if isinstance(column.type, pa.BaseExtensionType) else column


def require_all(column: Any, called: str) -> None:
    """Raises UsageError if a value of an Arrow column is missing (null); `called` is its name in the message."""
    if column.null_count:
        first = column.is_null().to_pylist().index(True)
        raise UsageError(
            f"{called}: {column.null_count} of {len(column)} values are missing, the first in row {first} of the rows "
            "read together; drop or fill these rows in the data"
        )


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
