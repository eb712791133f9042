"""The fields of rows of a table, of the numbers of a regression, and of several labels at once."""

import dataclasses

import numpy as np

from mpjax.data.fields import FromColumn, called
from mpjax.errors import UsageError
from mpjax.precision.dtypes import is_floating


@dataclasses.dataclass(frozen=True)
class Row(FromColumn):
    """The field of the inputs of one row of a table: standardised numbers, and zeros and ones of categories.

    Args:
      inputs: the name of each input.
    """

    inputs: tuple[str, ...]

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example."""
        return (len(self.inputs),)

    @property
    def dtype(self) -> np.dtype:
        """float32, the dtype in a batch."""
        return np.dtype(np.float32)

    @property
    def rank(self) -> int:
        """1, the number of axes of one example: the input."""
        return 1

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks inputs [..., F] of any floating dtype, and casts them to float32.

        Raises:
          UsageError: the number of inputs or the dtype differs, or a number is not finite in float32.
        """
        return _finite(self, name, value)


@dataclasses.dataclass(frozen=True)
class NumericTarget(FromColumn):
    """The field of the numbers of a regression, each as (number - mean) / std, computed in float64 before the cast.

    Args:
      columns: the name of each number.
      mean: the mean of each over the training split, in the units of the data.
      std: the standard deviation of each over the training split, positive.
    """

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example."""
        return (len(self.columns),)

    @property
    def dtype(self) -> np.dtype:
        """float32, the dtype in a batch, under every policy."""
        return np.dtype(np.float32)

    @property
    def outputs(self) -> int:
        """The number of outputs of a model."""
        return len(self.columns)

    @property
    def rank(self) -> int:
        """1, the number of axes of one example: the number."""
        return 1

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks standardised numbers [..., K] of any floating dtype, and casts them to float32.

        Raises:
          UsageError: the number of targets or the dtype differs, or a number is not finite in float32.
        """
        return _finite(self, name, value)

    def standardised(self, values: np.ndarray) -> np.ndarray:
        """Computes (values - mean) / std of numbers [..., K] in the units of the data, in float64; returns float32."""
        return ((np.asarray(values, np.float64) - self.mean) / self.std).astype(np.float32)

    def in_units(self, standardised: np.ndarray) -> np.ndarray:
        """Computes the numbers [..., K] in the units of the data, float64.

        Digits that a standardised float32 does not hold are rounded away: 123457 comes back as 123457.0.
        """
        values = np.asarray(standardised, np.float64) * self.std + self.mean
        steps = 10.0 ** np.floor(np.log10(np.asarray(self.std)) - 6)  # float32 holds 7 digits of a deviation
        with np.errstate(invalid="ignore"):
            tens = np.round(values / steps)
            # Where a step is a fraction, dividing by its inverse gives the nearest float64 to the decimal number.
            inverse = np.maximum(np.round(1 / steps), 1)  # 0 for steps above 2, which are not divided by it
            return np.where(steps < 1, tens / inverse, tens * steps) + 0.0  # no -0.0


@dataclasses.dataclass(frozen=True)
class Labels(FromColumn):
    """The field of several labels at once: 1 for each label that applies, else 0.

    Args:
      names: the name of each label.
    """

    names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example."""
        return (len(self.names),)

    @property
    def outputs(self) -> int:
        """The number of outputs of a model."""
        return len(self.names)

    @property
    def rank(self) -> int:
        """1, the number of axes of one example: the label."""
        return 1

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks labels [..., K] of 0 and 1 of any dtype, and casts them to int32.

        Raises:
          UsageError: the number of labels differs, or a value is neither 0 nor 1.
        """
        _require_width(self, name, value)
        if value.dtype.kind != "b" and (wrong := value[(value != 0) & (value != 1)]).size:
            raise UsageError(
                f"{called(name, self)}: {wrong.flat[0]}; wanted 0 or 1 for each of {', '.join(self.names[:8])}; for "
                "classes of which one applies write --task classification, for numbers --task regression"
            )
        return value.astype(np.int32)


def _require_width(field: Row | NumericTarget | Labels, name: str, value: np.ndarray) -> None:
    if value.shape[-1:] != field.shape:
        raise UsageError(f"{called(name, field)}: shape {value.shape}; wanted {field.shape} per example")


def _finite(field: Row | NumericTarget, name: str, value: np.ndarray) -> np.ndarray:
    _require_width(field, name, value)
    if not is_floating(value):
        raise UsageError(f"{called(name, field)}: dtype {value.dtype}; wanted floating point")
    with np.errstate(over="ignore"):
        value = value.astype(np.float32, copy=False)
    if not (finite := np.isfinite(value)).all():
        first = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise UsageError(f"{called(name, field)}: {value[first]} at {first}; wanted finite numbers")
    return value
