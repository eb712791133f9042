"""Checks the examples of a batch and stacks them into arrays."""

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
    """Calls functions for the examples of a batch, and adds the number of an example to its errors.

    Args:
      name: the name of the examples, such as `split 'train' of 'digits'`.
      numbers: the number of each example of the batch. None: errors name no example.
    """

    name: str
    numbers: Sequence[int] | None

    def map(self, function: Callable[..., Any], *columns: Iterable) -> list:
        """Calls `function` for each example, with its value of each of `columns` as arguments, and lists the results.

        Raises:
          UsageError: the UsageError of `function`, with the number of the example and `name` in its message. Other
            errors pass unchanged.
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
    """Checks the examples of a batch, casts them to the batch dtypes (`conform`), and stacks each field as [N, ...].

    All examples are checked at once, which is several times as fast. If a check fails, or their stored dtypes or shapes
    differ, they are checked one at a time, which finds the example that is wrong.

    Args:
      columns: for each field, a list of the examples' values, or one array [N, ...] of them.
      fields: the expected fields.
      examples: the name and numbers of the examples, for messages.

    Raises:
      UsageError: an example does not match its fields, or differs after the cast in dtype from the first example. The
        message names the example.
    """
    arrays = _conform_at_once(columns, fields)
    if arrays is not None:
        return arrays
    settled = examples.map(
        lambda *values: _conform_one(dict(zip(columns, values, strict=True)), fields), *columns.values()
    )
    for index, example in enumerate(settled):
        require_dtypes(example, settled[0], examples.numbers[index] if examples.numbers else index, examples.name)
    return {name: stacked([example[name] for example in settled]) for name in settled[0]}


def _conform_at_once(columns: Mapping[str, Sequence | np.ndarray], fields: Fields) -> Arrays | None:
    """Checks all examples together and stacks each field as [N, ...]; None if that fails.

    It fails if a check fails, if the stored dtypes or shapes differ, or if values have more axes than an example has.
    """
    try:
        arrays = {name: _stacked_alike(name, values) for name, values in columns.items()}
        if any(array is None or array.ndim != 1 + fields[name].rank for name, array in arrays.items()):
            return None
        return {name: _realigned(value) for name, value in conform(arrays, fields).items()}
    except UsageError:
        return None


def _stacked_alike(name: str, values: Sequence | np.ndarray) -> np.ndarray | None:
    """Stacks values of one dtype and shape; None if they differ, because NumPy would cast them to a common dtype.

    An array is returned unchanged: its values are stacked already.
    """
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
    """Raises UsageError if a dtype differs from the first example: the device scales uint8 images, but not float32.

    Args:
      example: the fields of an example or a batch.
      first: the fields of the first example.
      number: the number of the example, or of the first example of the batch.
      called: the name of the examples, for the message.
    """
    for name, value in example.items():
        if value.dtype != first[name].dtype:
            raise UsageError(
                f"{name}: example {number} of {called} is {value.dtype}, others are {first[name].dtype}; wanted one "
                f"dtype; write {name}.astype(np.float32) / 255 for all, or astype(np.uint8) for all"
            )


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays of one shape and dtype into a new array [N, ...], aligned to `_ALIGNMENT` bytes."""
    return np.stack(rows, out=aligned((len(rows), *rows[0].shape), rows[0].dtype))


def _realigned(values: np.ndarray) -> np.ndarray:
    """Copies `values` to memory aligned to `_ALIGNMENT` bytes, or returns them unchanged if they are aligned."""
    if values.ctypes.data % _ALIGNMENT == 0:
        return values
    copy = aligned(values.shape, values.dtype)
    copy[:] = values
    return copy


_ALIGNMENT = 64
"""The alignment in bytes that lets JAX use an array on a CPU without a copy."""


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialized array whose memory begins at a multiple of `_ALIGNMENT` bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
