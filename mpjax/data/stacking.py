"""Checks the examples of a batch, and stacks them into arrays."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.data.examples import array, conform
from mpjax.data.fields import Fields, called
from mpjax.errors import UsageError


Arrays = dict[str, np.ndarray]
"""Maps each field to an array [N, ...]."""


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Calls functions for the examples of a batch, and names the example in an error.

    Args:
      name: the name of the examples, such as `split 'train' of 'digits'`.
      numbers: the number of each example; None: errors name none.
    """

    name: str
    numbers: Sequence[int] | None

    def each(self, function: Callable[..., Any], *columns: Iterable) -> list:
        """Returns what `function` gives for each example.

        Raises:
          UsageError: as `function`; the message names the example.
        """
        done = []
        try:
            for values in zip(*columns, strict=True):
                done.append(function(*values))
        except UsageError as error:
            if self.numbers is None:
                raise
            raise UsageError(f"{error} (example {self.numbers[len(done)]} of {self.name})") from error
        return done


def conform_all(columns: Mapping[str, Sequence | np.ndarray], fields: Fields, examples: Numbered) -> Arrays:
    """Checks the examples of a batch, as `conform` checks one, and returns the fields as arrays [N, ...].

    All examples are checked at once, which is several times as fast; if anything is amiss, one after the other.

    Args:
      columns: for each field, the value of each example; values that are all in one array are not copied.
      fields: the expected fields.
      examples: calls functions for the examples.

    Raises:
      UsageError: an example does not match its fields, or has another dtype than the first one; the message names it.
    """
    found = _conform_at_once(columns, fields)
    if found is not None:
        return found
    settled = examples.each(
        lambda *values: _conform_one(dict(zip(columns, values, strict=True)), fields), *columns.values()
    )
    for place, example in enumerate(settled):
        require_dtypes(example, settled[0], examples.numbers[place] if examples.numbers else place, examples.name)
    return {name: stacked([example[name] for example in settled]) for name in settled[0]}


def _conform_at_once(columns: Mapping[str, Sequence | np.ndarray], fields: Fields) -> Arrays | None:
    """Returns the fields as arrays [N, ...]; None if anything is amiss, or stored dtypes or shapes differ."""
    try:
        arrays = {name: _stacked_alike(name, values) for name, values in columns.items()}
        if any(found is None or found.ndim != 1 + fields[name].rank for name, found in arrays.items()):
            return None
        return {name: _realigned(value) for name, value in conform(arrays, fields).items()}
    except UsageError:
        return None


def _stacked_alike(name: str, values: Sequence | np.ndarray) -> np.ndarray | None:
    """Stacks values of one dtype and shape; None if they differ, since NumPy would cast them to a common dtype."""
    if isinstance(values, np.ndarray):
        return values
    rows = [array(name, value) for value in values]
    dtype, shape = rows[0].dtype, rows[0].shape
    return stacked(rows) if all(row.dtype == dtype and row.shape == shape for row in rows) else None


def _conform_one(example: Mapping[str, Any], fields: Fields) -> Arrays:
    settled = conform(example, fields)
    for name, value in settled.items():
        if value.ndim != fields[name].rank:
            raise UsageError(
                f"{called(name, fields[name])}: shape {value.shape}; wanted {fields[name].rank} axes per example"
            )
    return settled


def require_dtypes(example: Arrays, first: Arrays, number: int, called: str) -> None:
    """Raises UsageError if dtypes differ from the first example: uint8 is scaled on the device, float32 is not.

    Args:
      example: the fields of an example or a batch.
      first: the fields of the first example.
      number: the number of the example, or of the first one of the batch.
      called: the name of the examples.
    """
    for name, value in example.items():
        if value.dtype != first[name].dtype:
            raise UsageError(
                f"{name}: example {number} of {called} is {value.dtype}, others are {first[name].dtype}; wanted one "
                f"dtype; write {name}.astype(np.float32) / 255 for all, or astype(np.uint8) for all"
            )


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays of one shape and dtype; the result begins at a multiple of `_ALIGNMENT`."""
    return np.stack(rows, out=aligned((len(rows), *rows[0].shape), rows[0].dtype))


def _realigned(values: np.ndarray) -> np.ndarray:
    """Returns `values` themselves if they begin at a multiple of `_ALIGNMENT`, else a copy that does."""
    if values.ctypes.data % _ALIGNMENT == 0:
        return values
    copy = aligned(values.shape, values.dtype)
    copy[:] = values
    return copy


_ALIGNMENT = 64
"""The bytes at whose multiples an array has to begin for JAX to use it on a CPU without a copy."""


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that begins at a multiple of `_ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
