"""Records the effect of each operation of a program on its values: ranges, lost values and errors."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.formats import NARROW, range_of
from mpjax.diagnosis.measurements import EXPONENTS as EXPONENTS
from mpjax.diagnosis.measurements import LARGEST, SQUARES, Marks, Measured, histogram, measure, onward, stacked
from mpjax.precision.dtypes import FLOAT32


class Site(NamedTuple):
    """Where a reading is taken: the result of an equation, or a parameter.

    Attributes:
      path: the module path, from the named scopes; empty outside all modules.
      direction: "forward" or "backward"; for parameters also "gradient" or "update".
      operation: the name of the primitive; "parameter", "constant 1e-08", "saturation" or "apply_updates" for others.
      dtype: the dtype of the result.
      shape: the shape of the result.
      source: the user's file and line; `NO_SOURCE` if unknown.
      terms: the largest number of values that are added into one value of the result; 1 without addition.
      steps: the number of steps that the scans around it take together; 1 outside of scans.
      caller: the user's file and line that calls the function of `source`; empty if there is none.
    """

    path: str
    direction: str
    operation: str
    dtype: np.dtype
    shape: tuple[int, ...]
    source: str
    terms: int = 1
    steps: int = 1
    caller: str = ""


class Reading(NamedTuple):
    """Statistics of one result in an emulated run, or of several combined. All counts are floats.

    Attributes:
      size: number of values.
      largest: largest finite magnitude in half precision.
      total: sum of finite magnitudes in half precision.
      non_finite: number of values that are inf or nan in half precision but not in the reference.
      reference_non_finite: number of values that are inf or nan in the reference.
      overflow: number of values that rounding turned into inf.
      underflow: number of values that rounding turned into zero.
      subnormal: number of values that are subnormal in the site's dtype and so have fewer bits.
      lost: sum of squares of the values that rounding turned into zero.
      exact: sum of squares before rounding.
      noise: sum of squares of the rounding errors.
      error: sum of squares of the difference from the reference.
      reference: sum of squares in the reference.
      histogram: [88] counts by exponent (`EXPONENTS`) of a sample of at most 4,096 values of the reference.
      begins: number of evaluations with finite operands, a finite reference and a result that is not finite in half
        precision.
      reference_begins: number of evaluations with finite operands and a result that is not finite, both in the
        reference.
      flushed: index (from 0, among all sites of the run) of the latest earlier site with underflow to zero that the
        result depends on; -1 if none.
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
    noise: float
    error: float
    reference: float
    histogram: np.ndarray
    begins: float
    reference_begins: float
    flushed: int

    @property
    def relative_error(self) -> float:
        """The relative error of all values in the Euclidean norm; if the reference is zero, 1 for any error, else 0."""
        return ratio(self.error, self.reference)

    @property
    def lost_fraction(self) -> float:
        """The fraction of the Euclidean norm before rounding that underflowed to zero; 0 if that norm is zero."""
        return ratio(self.lost, self.exact)


def ratio(part: float, whole: float) -> float:
    """Computes sqrt(part / whole). If `whole` is zero, the result is 1 for a positive part, else 0."""
    return float(np.sqrt(part / whole)) if whole > 0 else float(part > 0)


def together(readings: Iterable[Reading]) -> Reading:
    """Combines one or more readings into one: sums and counts are added, the largest values are kept."""
    columns = zip(Reading._fields, zip(*readings, strict=True), strict=True)
    return Reading._make(max(column) if name in LARGEST else sum(column) for name, column in columns)


class Recorder:
    """Records a reading of each result in an emulated run, and keeps them on the device until `readings` is called.

    Attributes:
      sites: where each reading was taken, one for each floating result, in program order; the iterations of a loop
        share their sites.
      measured: the readings of the sites, as arrays.
      start: the index of the first site among all sites of the run; above 0 for the body of a loop.
    """

    def __init__(self, start: int = 0):
        self.sites: list[Site] = []
        self.measured: list[Measured] = []
        self.start = start

    def observe(self, site: Site, wide, exact, low, marks: Sequence[Marks]) -> Marks:
        """Records the reading of a result and returns the marks of the result.

        Args:
          site: the site of the result.
          wide: the result in the reference.
          exact: the result in half precision, before rounding.
          low: the result after rounding, in the dtype of `wide` and `exact`.
          marks: the `Marks` of the operands: whether each is finite, and which underflow it depends on.
        """
        measured = measure(wide, exact, low, *_rounding(site, low))
        measured["histogram"] = histogram(measured.pop("sample"))
        non_finite = measured.pop("all_non_finite"), measured["reference_non_finite"]
        history, after = onward(*non_finite, measured["underflow"], tuple(marks), self._next)
        self.sites.append(site)
        self.measured.append({**measured, **history})
        return after

    @property
    def _next(self) -> np.int32:
        """The index of the next site among all sites of the run."""
        return np.int32(self.start + len(self.sites))

    def within(self) -> "BodyRecorder":
        """Makes a recorder for the body of a loop, where readings are tracers.

        `extend` then adds them to this recorder.
        """
        return BodyRecorder(self.start + len(self.sites))

    def extend(self, sites: Sequence[Site], measured: Sequence[Measured]) -> None:
        """Adds the sites in the body of a loop, and their readings combined over all iterations."""
        self.sites += sites
        self.measured += measured

    def readings(self) -> list[Reading]:
        """Fetches all readings from the device, in the order of `sites`."""
        measured = jax.device_get(self.measured)
        return [Reading(**{name: _number(name, value) for name, value in fields.items()}) for fields in measured]


class BodyRecorder(Recorder):
    """Records the readings of the body of a loop, in which small results of one size are measured together.

    One by one, each adds two hundred operations to the loop: the body of a GRU had 10,000 in place of 2,900.
    """

    def __init__(self, start: int = 0):
        super().__init__(start)
        self._waiting: dict[tuple, dict[int, tuple]] = {}

    def observe(self, site: Site, wide, exact, low, marks: Sequence[Marks]) -> Marks:
        """As `Recorder.observe`, but a result of at most `MOST` values is measured later, in `stacked`."""
        if low.size > MOST:
            return super().observe(site, wide, exact, low, marks)
        smallest_normal, rounds = _rounding(site, low)
        counts = ~jnp.isfinite(low), ~jnp.isfinite(wide), (low == 0) & (exact != 0) & rounds
        history, after = onward(*(jnp.any(flags).astype(FLOAT32) for flags in counts), tuple(marks), self._next)
        arguments = *map(jnp.ravel, (wide, exact, low)), smallest_normal, rounds
        self._waiting.setdefault((low.size, low.dtype), {})[len(self.sites)] = arguments
        self.sites.append(site)
        self.measured.append(history)
        return after

    def stacked(self) -> Measured:
        """Measures what is left, and stacks the readings of all sites along a new first axis; empty without sites."""
        groups: dict[tuple[int, ...], Measured] = {}
        for results in self._waiting.values():
            measured = jax.vmap(measure)(*map(jnp.stack, zip(*results.values(), strict=True)))
            measured["histogram"] = jax.vmap(histogram)(measured.pop("sample"))
            del measured["all_non_finite"]
            groups[tuple(results)] = measured | stacked([self.measured[index] for index in results])
        grouped = set().union(*groups)
        if alone := [index for index in range(len(self.sites)) if index not in grouped]:
            groups[tuple(alone)] = stacked([self.measured[index] for index in alone])
        order = np.argsort(sum(groups, ()))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *groups.values()) if groups else {}


MOST = 2**14
"""The largest number of values of a result in a loop that is kept until the end of the iteration, to be measured."""


def _rounding(site: Site, low) -> tuple[Any, np.bool_]:
    """The smallest normal number of the dtype that a site rounds to, and whether that dtype loses range."""
    return low.dtype.type(range_of(site.dtype).smallest_normal), np.bool_(site.dtype in NARROW)


def _number(name: str, value) -> Any:
    """Converts a field of a reading from arrays to a number: of a sum of squares, multiplies by its scale."""
    if name in SQUARES:
        scale, total = map(float, value)
        return scale**2 * total
    return value if name == "histogram" else value.item()
