"""What a cast of an array to another floating dtype loses, counted."""

from typing import NamedTuple

import numpy as np


_CHUNK = 2**20


class Losses(NamedTuple):
    """Of one array in one cast.

    Attributes:
      nonfinite: NaN and inf before the cast.
      overflow: finite values that become inf.
      flushed: values other than zero that become zero.
      error: the largest relative error of all other values.
    """

    nonfinite: int
    overflow: int
    flushed: int
    error: float


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest; itself if it is in that dtype."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # told by `losses`
        return array.astype(dtype, copy=False)


def losses(array: np.ndarray, dtype: np.dtype) -> Losses:
    """Counts what `cast(array, dtype)` loses, in pieces, so that no second array of this size is made."""
    counts = np.zeros(3, np.int64)
    error = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        # float64 holds every value of the dtypes that a file of weights has.
        before = flat[start : start + _CHUNK].astype(np.float64)
        finite = np.isfinite(before)
        counts[0] += before.size - np.count_nonzero(finite)
        if dtype == array.dtype:
            continue
        after = cast(flat[start : start + _CHUNK], dtype).astype(np.float64)
        overflow = finite & ~np.isfinite(after)
        flushed = (before != 0) & (after == 0)
        counts[1:] += np.count_nonzero(overflow), np.count_nonzero(flushed)
        kept = finite & ~overflow & ~flushed & (before != 0)
        relative = np.abs(after[kept] - before[kept]) / np.abs(before[kept])
        error = max(error, float(relative.max(initial=0.0)))
    nonfinite, overflow, flushed = map(int, counts)
    return Losses(nonfinite, overflow, flushed, error)
