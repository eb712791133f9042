"""What each operation of a program did to its values: ranges, losses, errors; and sums of them by module."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.diagnosis.measurements import EXPONENTS as EXPONENTS
from mpjax.diagnosis.measurements import LARGEST, SQUARES, Marks, Measured, histogram, measure, onward
from mpjax.precision.dtypes import HALF, float_range


class Site(NamedTuple):
    """An equation of the program, or a parameter stored in half precision.

    Attributes:
      path: named scopes (module path); empty outside all of them.
      direction: "forward" or "backward".
      operation: the primitive; "parameter".
      dtype: of its result.
      shape: of its result.
      source: the user's file and line.
    """

    path: str
    direction: str
    operation: str
    dtype: np.dtype
    shape: tuple[int, ...]
    source: str


class Reading(NamedTuple):
    """The values of one result, or of several together.

    Attributes:
      size: number of values.
      largest: largest finite magnitude in half precision.
      total: sum of finite magnitudes in half precision.
      non_finite: values that are inf or nan in half precision and not in the reference.
      reference_non_finite: values that are inf or nan in the reference.
      overflow: values that rounding made inf.
      underflow: values that rounding made zero.
      subnormal: values that rounding left with fewer bits.
      lost: sum of squares of the values that rounding made zero.
      exact: sum of squares before rounding.
      error: sum of squares of the difference from the reference.
      reference: sum of squares in the reference.
      histogram: [88] counts by exponent of a sample of at most 4,096 values of the reference.
      begins: turns in which it was not finite in half precision, though all that it got was.
      reference_begins: the same in the reference.
      flushed: number of the latest site before it, on which it depends, where rounding made zeros; -1 for none.
    """

    size: float
    largest: float
    total: float
    non_finite: float
    reference_non_finite: float
    overflow: float
    underflow: float
    subnormal: float
    lost: float
    exact: float
    error: float
    reference: float
    histogram: np.ndarray
    begins: float
    reference_begins: float
    flushed: int

    @property
    def relative_error(self) -> float:
        """Of all values together, in the Euclidean norm; 0 where there is nothing to be wrong."""
        return ratio(self.error, self.reference)

    @property
    def lost_share(self) -> float:
        """Of the Euclidean norm, what rounding to zero took."""
        return ratio(self.lost, self.exact)


def ratio(part: float, whole: float) -> float:
    """The root of part / whole."""
    return float(np.sqrt(part / whole)) if whole > 0 else float(part > 0)


def together(readings: Iterable[Reading]) -> Reading:
    """Several readings as one."""
    columns = zip(Reading._fields, zip(*readings, strict=True), strict=True)
    return Reading._make(max(column) if name in LARGEST else sum(column) for name, column in columns)


class Recorder:
    """Takes the readings of a run, on the device until they are asked for.

    Attributes:
      sites: one for each equation with a floating result, in program order; an equation in a loop has one.
      measured: their readings, as arrays.
      start: number of the first.
    """

    def __init__(self, start: int = 0):
        self.sites: list[Site] = []
        self.measured: list[Measured] = []
        self.start = start

    def observe(self, site: Site, wide, exact, low, marks: Sequence[Marks]) -> Marks:
        """Reads a result of operands with `marks`; gives its own.

        Args:
          site: where.
          wide: the result in the reference.
          exact: the result in half precision, before rounding.
          low: and after, in the dtype of the others.
          marks: of the operands.
        """
        smallest_normal = float_range(site.dtype).smallest_normal
        measured = measure(wide, exact, low, low.dtype.type(smallest_normal), np.bool_(site.dtype in HALF))
        measured["histogram"] = histogram(measured.pop("sample"))
        non_finite = measured.pop("all_non_finite"), measured["reference_non_finite"]
        number = np.int32(self.start + len(self.sites))
        history, after = onward(*non_finite, measured["underflow"], tuple(marks), number)
        self.sites.append(site)
        self.measured.append({**measured, **history})
        return after

    def within(self) -> "Recorder":
        """For the body of a loop, whose readings are arrays of the trace."""
        return Recorder(self.start + len(self.sites))

    def extend(self, sites: Sequence[Site], measured: Sequence[Measured]) -> None:
        """Adds what was recorded within."""
        self.sites += sites
        self.measured += measured

    def readings(self) -> list[Reading]:
        """All of them, from the device."""
        found = jax.device_get(self.measured)
        return [Reading(**{name: _number(name, value) for name, value in fields.items()}) for fields in found]


def _number(name: str, value) -> Any:
    if name in SQUARES:
        scale, total = map(float, value)
        return scale**2 * total
    return value if name == "histogram" else value.item()
