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
      sites: the floating results and the half-precision inputs, in program order.
      readings: the reading of each site.
      wide: the scaled loss and the scaled gradients of the reference.
      low: the scaled loss and the scaled gradients in half precision.
    """

    sites: list[Site]
    readings: list[Reading]
    wide: list
    low: list


def run(program: Program, scale: float, *, isolated: bool = False, rounds: Callable = everywhere) -> Trace:
    """Emulates the step together with its float32 reference, and records a reading of every operation.

    Args:
      program: the step.
      scale: the loss scale.
      isolated: True to give each module float32 inputs, as in `Emulator`.
      rounds: the modules that round, as in `Emulator`.
    """
    recorder = Recorder()
    outputs = Emulator(rounds=rounds, isolated=isolated, recorder=recorder).run(*program.at(scale))
    wide, low = jax.device_get(([p.wide for p in outputs], [p.low for p in outputs]))
    return Trace(recorder.sites, recorder.readings(), wide, low)


class TraceRow(NamedTuple):
    """A row of the table: a module in one direction, or the update of a parameter.

    Attributes:
      path: the path of the module or of the parameter; empty outside all modules.
      direction: "forward", "backward" or "update".
      dtype: the narrowest dtype of the results; for an update, the dtype of the parameter.
      largest: the largest finite magnitude of the results.
      mean: the mean magnitude of the results, with 0 for inf and nan.
      overflow: the share of half-precision values that rounding made inf.
      underflow: the share that rounding made zero; for an update, the share that does not change the parameter.
      subnormal: the share that is subnormal, with fewer bits.
      error: the largest relative error of a result, including errors of earlier modules.
      own_error: the largest relative error of a result with float32 inputs; None if it was not measured.
      histogram: the counts by exponent of a sample of the results in float32; for an update, of all its finite values.
      non_finite: the share of values that are inf or nan, but not in float32, including values of earlier modules.
      sqnr: the least signal-to-quantisation-noise ratio of values rounded to float8, in decibels: ten times the decimal
        logarithm of the sum of squares over the sum of squares of the rounding errors; None if no value is
        rounded to float8.
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
        """The base-2 exponents of the histogram's smallest and the largest magnitude; None if all values were zero."""
        seen = [e for e, count in zip(EXPONENTS, self.histogram, strict=True) if count]
        if self.largest > 0:
            seen.append(math.frexp(self.largest)[1] - 1)
        return (min(seen), max(seen)) if seen else None

    @property
    def harm(self) -> tuple[float, float]:
        """A sort key, larger for more harm: overflow first, then underflow plus the module's own error.

        If the own error was not measured, the error takes its place. It counts as at most 1.
        """
        own_error = self.error if self.own_error is None else self.own_error
        return self.overflow, self.underflow + min(own_error, 1.0)


def table_of(trace: Trace, alone: Trace | None) -> tuple[TraceRow, ...]:
    """Summarises a run in one row for each module and direction, in program order.

    Own errors come from `alone`, a run in which each module got float32 inputs; None if there was no such run.
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
                overflow=_share(rounded, "overflow"),
                underflow=_share(rounded, "underflow"),
                subnormal=_share(rounded, "subnormal"),
                error=max(reading.relative_error for _, reading in group),
                own_error=own_errors.get(key),
                histogram=tuple(int(count) for count in every.histogram),
                non_finite=_share(every, "non_finite"),
                sqnr=min(float8, default=None),
            )
        )
    return tuple(rows)


def decibels(reading: Reading) -> float:
    """The signal-to-quantisation-noise ratio of a reading whose values are not all zero.

    It is at most 200 dB, the ratio without noise.
    """
    return min(200.0, 10 * math.log10(reading.exact / reading.noise)) if reading.noise else 200.0


def _share(reading: Reading | None, name: str) -> float:
    return getattr(reading, name) / reading.size if reading is not None and reading.size else 0.0
