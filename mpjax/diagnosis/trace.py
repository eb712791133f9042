"""Emulates a step once, with a reading of every operation, and summarises the readings in a table."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from mpjax.diagnosis.emulate import Emulator, everywhere
from mpjax.diagnosis.formats import FLOAT8, NARROW
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Reading, Recorder, Site, together


class Trace(NamedTuple):
    """One emulated run of a step.

    Attributes:
      sites: where each reading was taken: all floating results and the half-precision inputs, in program order.
      readings: the statistics of each site, in the same order.
      wide: the loss and the gradients of the float32 reference, multiplied by the loss scale, as NumPy arrays.
      low: the same in half precision.
    """

    sites: list[Site]
    readings: list[Reading]
    wide: list
    low: list


def emulated(program: Program, scale: float, *, isolated: bool = False, rounds: Callable = everywhere) -> Trace:
    """Emulates the step together with its float32 reference, and records a reading of every operation.

    Args:
      program: the step.
      scale: the loss scale.
      isolated: True to give each module float32 inputs, as in `Emulator`.
      rounds: `(module path) -> bool`, True if the module rounds, as in `Emulator`; by default all do.
    """
    recorder = Recorder()
    outputs = Emulator(rounds=rounds, isolated=isolated, recorder=recorder).run(*program.at(scale))
    wide, low = jax.device_get(([p.wide for p in outputs], [p.low for p in outputs]))
    return Trace(recorder.sites, recorder.readings(), wide, low)


class TraceRow(NamedTuple):
    """A row of a diagnosis's table: a module in one direction, or the update of a parameter.

    Fractions are between 0 and 1.

    Attributes:
      path: the path of the module or of the parameter; empty outside all modules.
      direction: "forward", "backward" or "update".
      dtype: the narrowest dtype of the results; for an update, the dtype of the parameter.
      largest: the largest finite magnitude of the results.
      mean: the mean magnitude of the results, with 0 for inf and nan.
      overflow: the fraction of half-precision values that rounding turned into inf.
      underflow: the fraction that rounding turned into zero; for an update, the fraction that is not zero but leaves
        the parameter unchanged.
      subnormal: the fraction that is subnormal, which means fewer bits.
      error: the largest relative error of a result against float32 (Euclidean norm), including errors of earlier
        modules.
      own_error: the largest relative error of a result when the module gets float32 inputs; None if it was not
        measured.
      histogram: [88] counts by exponent (`EXPONENTS`) of a sample of the results in float32; for an update, of all its
        finite values.
      non_finite: the fraction of values that are inf or nan in half precision but not in float32, whatever module
        caused it.
      sqnr: the least signal-to-quantisation-noise ratio of values rounded to float8, in decibels: ten times the decimal
        logarithm of the sum of squares over the sum of squares of the rounding errors; None if no value is rounded to
        float8.
    """

    path: str
    direction: str
    dtype: np.dtype
    largest: float
    mean: float
    overflow: float
    underflow: float
    subnormal: float
    error: float
    own_error: float | None
    histogram: tuple[int, ...]
    non_finite: float = 0.0
    sqnr: float | None = None

    @property
    def exponents(self) -> tuple[int, int] | None:
        """The base-2 exponents of the smallest and the largest magnitude; None if all values are zero.

        The smallest is from the histogram, the largest from the histogram or `largest`.
        """
        occupied = [e for e, count in zip(EXPONENTS, self.histogram, strict=True) if count]
        if self.largest > 0:
            occupied.append(math.frexp(self.largest)[1] - 1)
        return (min(occupied), max(occupied)) if occupied else None

    @property
    def harm(self) -> tuple[float, float]:
        """A sort key, larger for more harm: the overflow first, then underflow plus `own_error`.

        `error` replaces an `own_error` that was not measured. Either counts as at most 1.
        """
        own_error = self.error if self.own_error is None else self.own_error
        return self.overflow, self.underflow + min(own_error, 1.0)


def table_of(trace: Trace, alone: Trace | None) -> tuple[TraceRow, ...]:
    """Summarises a run in one row for each module and direction, in the order of their first results.

    Args:
      trace: the run, in which errors propagate from module to module.
      alone: the run in which each module gets float32 inputs, for `own_error`; None leaves `own_error` None in every
        row.
    """
    grouped: dict[tuple[str, str], list[tuple[Site, Reading]]] = {}
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        grouped.setdefault((site.path, site.direction), []).append((site, reading))
    own_errors: dict[tuple[str, str], float] = {}
    if alone is not None:
        for site, reading in zip(alone.sites, alone.readings, strict=True):
            key = site.path, site.direction
            own_errors[key] = max(own_errors.get(key, 0.0), reading.relative_error)
    rows = []
    for key, group in grouped.items():
        every = together(reading for _, reading in group)
        narrowest = min((site.dtype for site, _ in group), key=lambda dtype: dtype.itemsize)
        half = [r for site, r in group if site.dtype in NARROW]
        rounded = together(half) if half else None
        float8 = [decibels(r) for site, r in group if site.dtype in FLOAT8 and r.exact]
        rows.append(
            TraceRow(
                *key,
                dtype=narrowest,
                largest=every.largest,
                mean=every.total / every.size if every.size else 0.0,
                overflow=_fraction(rounded, "overflow"),
                underflow=_fraction(rounded, "underflow"),
                subnormal=_fraction(rounded, "subnormal"),
                error=max(reading.relative_error for _, reading in group),
                own_error=own_errors.get(key),
                histogram=tuple(int(count) for count in every.histogram),
                non_finite=_fraction(every, "non_finite"),
                sqnr=min(float8, default=None),
            )
        )
    return tuple(rows)


def decibels(reading: Reading) -> float:
    """The signal-to-quantisation-noise ratio of a reading, in decibels, at most 200 dB (also the value without noise).

    The values before rounding must not all be zero.
    """
    return min(200.0, 10 * math.log10(reading.exact / reading.noise)) if reading.noise else 200.0


def _fraction(reading: Reading | None, name: str) -> float:
    """The count `name` of a reading as a fraction of its number of values; 0 without a reading or values."""
    return getattr(reading, name) / reading.size if reading is not None and reading.size else 0.0
