"""What each operation of a program did to its values: ranges, losses, errors; and sums of them by module."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import HALF, float_range


EXPONENTS = range(-48, 40)
"""Of the histogram: how many values lie in [2^e, 2^(e+1)); the outermost take what is beyond."""

_SAMPLE = 4096


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


class Marks(NamedTuple):
    """What is known of a value's history; arrays, so that loops can carry them.

    Attributes:
      finite: whether all of it is finite in half precision.
      reference_finite: and in the reference.
      flushed: number of the latest site that it depends on and where rounding made zeros; -1 for none.
    """

    finite: Any = np.True_
    reference_finite: Any = np.True_
    flushed: Any = np.int32(-1)


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


Measured = dict[str, Any]
"""The fields of a `Reading` as arrays."""

_LARGEST = frozenset({"largest", "flushed"})
"""What of several readings is the largest of theirs; the rest are sums."""

_SQUARES = frozenset({"lost", "exact", "error", "reference"})
"""Sums of squares: on the device a scale and the sum of squares over it, as float32 does not hold them."""


def ratio(part: float, whole: float) -> float:
    """The root of part / whole."""
    return float(np.sqrt(part / whole)) if whole > 0 else float(part > 0)


def together(readings: Iterable[Reading]) -> Reading:
    """Several readings as one."""
    columns = zip(Reading._fields, zip(*readings, strict=True), strict=True)
    return Reading._make(max(column) if name in _LARGEST else sum(column) for name, column in columns)


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
          low: and after.
          marks: of the operands.
        """
        number = jnp.int32(self.start + len(self.sites))
        measured, after = _measure(wide, exact, low, tuple(marks), number, site.dtype)
        self.sites.append(site)
        self.measured.append(measured)
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


def none_like(shapes) -> list[Measured]:
    """Readings of no values at all, in the shapes of others."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return [{**measured, "flushed": jnp.int32(-1)} for measured in zeros]


def joined(first: Measured, second: Measured) -> Measured:
    """Two readings as one, on the device."""

    def join(name, a, b):
        if name in _LARGEST:
            return jnp.maximum(a, b)
        if name not in _SQUARES:
            return a + b
        scale = jnp.maximum(a[0], b[0])
        over = jnp.where(scale > 0, scale, 1.0)
        return scale, a[1] * jnp.square(a[0] / over) + b[1] * jnp.square(b[0] / over)

    return {name: join(name, value, second[name]) for name, value in first.items()}


def _number(name: str, value) -> Any:
    if name in _SQUARES:
        scale, total = map(float, value)
        return scale**2 * total
    return value if name == "histogram" else value.item()


@functools.partial(jax.jit, static_argnames="dtype")
def _measure(wide, exact, low, marks: tuple[Marks, ...], number, dtype) -> tuple[Measured, Marks]:
    finite, wide_finite = jnp.isfinite(low), jnp.isfinite(wide)
    size = jnp.where(finite, jnp.abs(low), 0.0)
    rounded = dtype in HALF
    overflow = jnp.isfinite(exact) & ~finite if rounded else jnp.zeros_like(finite)
    underflow = (low == 0) & (exact != 0) if rounded else jnp.zeros_like(finite)
    subnormal = (size > 0) & (size < float_range(dtype).smallest_normal)
    both = finite & wide_finite
    exact = jnp.where(jnp.isfinite(exact), exact, 0.0)
    reference = jnp.where(wide_finite, wide, 0.0)

    def count(flags):
        return jnp.sum(flags, dtype=jnp.float32)

    def squares(values):
        scale = jnp.max(jnp.abs(values), initial=0.0).astype(jnp.float32)
        over = jnp.where(scale > 0, scale, 1.0).astype(values.dtype)
        return scale, jnp.sum(jnp.square(values / over), dtype=jnp.float32)

    flushed = functools.reduce(jnp.maximum, (mark.flushed for mark in marks), jnp.int32(-1))
    got_finite = functools.reduce(jnp.logical_and, (mark.finite for mark in marks), True)
    got_reference_finite = functools.reduce(jnp.logical_and, (mark.reference_finite for mark in marks), True)
    all_finite, all_wide_finite = jnp.all(finite), jnp.all(wide_finite)
    measured = {
        "size": jnp.float32(low.size),
        "largest": jnp.max(size, initial=0.0).astype(jnp.float32),
        "total": jnp.sum(size, dtype=jnp.float32),
        "non_finite": count(~finite & wide_finite),
        "reference_non_finite": count(~wide_finite),
        "overflow": count(overflow),
        "underflow": count(underflow),
        "subnormal": count(subnormal),
        "lost": squares(jnp.where(underflow, exact, 0.0)),
        "exact": squares(exact),
        "error": squares(jnp.where(both, low - wide, 0.0)),
        "reference": squares(jnp.where(both, reference, 0.0)),
        "histogram": _histogram(reference),
        "begins": count(got_finite & ~all_finite & all_wide_finite),
        "reference_begins": count(got_reference_finite & ~all_wide_finite),
        "flushed": flushed,
    }
    marks_after = Marks(all_finite, all_wide_finite, jnp.where(jnp.any(underflow), number, flushed))
    return measured, marks_after


def _histogram(values) -> jax.Array:
    flat = jnp.ravel(values)
    sample = jnp.abs(flat[:: max(1, -(-flat.size // _SAMPLE))])
    exponent = jnp.frexp(sample)[1] - 1
    bins = jnp.clip(exponent - EXPONENTS.start, 0, len(EXPONENTS) - 1)
    return jnp.zeros(len(EXPONENTS), jnp.float32).at[bins].add(jnp.where(sample > 0, 1.0, 0.0))
