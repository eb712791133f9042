"""What each operation of a program did to its values: ranges, losses, errors; and sums of them by module."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.emulate import Step
from mpjax.precision.dtypes import HALF, float_range


EXPONENTS = range(-48, 40)
"""Of the histogram: how many values lie in [2^e, 2^(e+1)); the outermost take what is beyond."""

_SAMPLE = 4096


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


def read(step: Step) -> Reading:
    """The reading of one step."""
    counts, powers, histogram = jax.device_get(_read(step.wide, step.exact, step.low, step.site.dtype))
    squares = [float(scale) ** 2 * float(total) for scale, total in powers]
    return Reading._make([float(step.low.size), *map(float, counts), *squares, histogram])


def together(readings: Iterable[Reading]) -> Reading:
    """Several readings as one."""
    columns = zip(Reading._fields, zip(*readings, strict=True), strict=True)
    return Reading._make(max(column) if name == "largest" else sum(column) for name, column in columns)


@functools.partial(jax.jit, static_argnums=3)
def _read(wide, exact, low, dtype) -> tuple:
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
        # By the largest, so that the squares of large values, and of small ones, stay numbers of float32.
        scale = jnp.max(jnp.abs(values), initial=0.0)
        scale = jnp.where(scale > 0, scale, 1.0)
        return scale.astype(jnp.float32), jnp.sum(jnp.square(values / scale), dtype=jnp.float32)

    powers = [squares(x) for x in (jnp.where(underflow, exact, 0.0), exact)]
    powers += [squares(x) for x in (jnp.where(both, low - wide, 0.0), jnp.where(both, reference, 0.0))]
    counts = (
        jnp.max(size, initial=0.0),
        jnp.sum(size, dtype=jnp.float32),
        *map(count, (~finite & wide_finite, ~wide_finite, overflow, underflow, subnormal)),
    )
    return counts, powers, _histogram(reference)


def _histogram(values) -> jax.Array:
    flat = jnp.ravel(values)
    sample = jnp.abs(flat[:: max(1, -(-flat.size // _SAMPLE))])
    exponent = jnp.frexp(sample)[1] - 1
    bins = jnp.clip(exponent - EXPONENTS.start, 0, len(EXPONENTS) - 1)
    return jnp.zeros(len(EXPONENTS), jnp.float32).at[bins].add(jnp.where(sample > 0, 1.0, 0.0))
