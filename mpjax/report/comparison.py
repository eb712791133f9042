"""Compares the curves of two groups of runs, relative to the spread of their seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.config.choices import BEST
from mpjax.errors import UsageError
from mpjax.report.jsonl import Records


class Group(NamedTuple):
    """Runs that differ only in the seed.

    Attributes:
      name: the name of the group.
      runs: the metrics of each run by folder, in the form of `read_metrics`.
    """

    name: str
    runs: Mapping[str, Records]


class Band(NamedTuple):
    """The interval of a group's values, `center` ± `half`, as numbers or arrays over steps.

    Both are NaN where a run of the group is not finite.
    """

    center: Any
    half: Any


class Seeds(NamedTuple):
    """Mean and sample standard deviation of a group's runs; inf or NaN if a run is. `std` is None for a single run."""

    mean: float
    std: float | None


class Contrast(NamedTuple):
    """The difference between two groups in one value, such as the last loss.

    Attributes:
      reference: the band of the reference group.
      other: the band of the other group.
      seeds: the mean and the standard deviation of both groups, independent of the kind of band.
      difference: the difference of the means, other - reference.
      bands: the difference of the centers, other - reference, divided by the sum of both `half` or, with one run each,
        by the tolerance times the larger center. Above 1 in magnitude, the groups differ. It is inf if only one center
        is finite, and 0 if neither is.
    """

    reference: Band
    other: Band
    seeds: tuple[Seeds, Seeds]
    difference: float
    bands: float


class Comparison(NamedTuple):
    """One metric of two groups.

    Attributes:
      metric: the name of the metric.
      steps: the steps at which all runs of both groups have the metric.
      reference: the band of the smoothed curves of the first group, over `steps`.
      other: the band of the smoothed curves of the second group, over `steps`.
      final: the contrast at the last of `steps`, not smoothed.
      best: the contrast of each run's best value at `steps`; None if the metric has no best value.
      parts_at: the first of `steps` from which the bands do not touch, or differ by more than the tolerance, until the
        end; None if there is no such step.
      apart: the number of `steps` from `parts_at` on.
      by_design: True for the loss scale if one policy scales the loss and the other does not. The difference is then
        ignored.
      window: the number of values in the moving average from which the bands and `parts_at` are computed; 1 for none.
    """

    metric: str
    steps: list[int]
    reference: Band
    other: Band
    final: Contrast
    best: Contrast | None
    parts_at: int | None
    apart: int
    by_design: bool = False
    window: int = 1


def compare_groups(
    metric: str, reference: Group, other: Group, *, band: str = "range", tolerance: float = 0.05, smoothing: int = 1
) -> Comparison:
    """Compares one metric of two groups of runs, at the steps at which all of their runs have it.

    Args:
      metric: the name of the metric in metrics.jsonl.
      reference: the group to compare with.
      other: the group to compare.
      band: "range" (lowest to highest seed) or "std" (two standard deviations about the mean).
      tolerance: the relative difference up to which two groups of one run each are considered equal; unused if a group
        has more runs.
      smoothing: the number of reports over which training metrics (`train/`) are averaged; 1 for none. Test metrics and
        the loss scale are never averaged.

    Raises:
      UsageError: a run lacks the metric, or the runs have no step in common.
    """
    curves = [[_curve(metric, *run) for run in group.runs.items()] for group in (reference, other)]
    shared = set.intersection(*(set(curve) for group in curves for curve in group))
    if not shared:
        folders = ", ".join([*reference.runs, *other.runs])
        every = "log_every" if metric.startswith("train/") else "eval_every"
        raise UsageError(f"no step at which all of {folders} have {metric}: wanted runs with the same loop.{every}")
    steps = sorted(shared)
    window = smoothing if metric.startswith("train/") and metric != "train/loss_scale" else 1
    values = [np.array([[curve[step] for step in steps] for curve in group], np.float64) for group in curves]
    smooth = [_band(_smoothed(v, window), band) for v in values]
    single = tolerance if len(reference.runs) == len(other.runs) == 1 else None
    by_design = metric == "train/loss_scale" and len({bool((v == 1).all()) for v in values}) == 2
    apart = (np.abs(_in_bands(smooth[0], smooth[1], single)) > 1) & (not by_design)
    together = np.flatnonzero(~apart)
    first = int(together[-1]) + 1 if len(together) else 0
    best = BEST.get(metric.rsplit("/", 1)[-1])
    bests = best and [np.array([best(_finite(run)) for run in group], np.float64) for group in values]
    return Comparison(
        metric,
        steps,
        smooth[0],
        smooth[1],
        final=_contrast([v[:, -1] for v in values], band, single),
        best=_contrast(bests, band, single) if bests else None,
        parts_at=steps[first] if first < len(steps) else None,
        apart=len(steps) - first,
        by_design=by_design,
        window=window,
    )


def _curve(metric: str, folder: str, records: Records) -> dict[int, float]:
    """The values of a metric by step; raises UsageError, with the names of the other metrics, if there are none."""
    curve = {record["step"]: record[metric] for record in records if metric in record}
    if not curve:
        has = sorted({name for record in records for name in record if "/" in name})
        raise UsageError(f"{folder} has no {metric} in its metrics.jsonl: it has {', '.join(has) or 'no metrics yet'}")
    return curve


def _finite(values: Sequence[float] | np.ndarray) -> list[float]:
    """The finite values in a list; a list of one NaN if there are none."""
    return [value for value in values if math.isfinite(value)] or [math.nan]


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Averages the last `window` values [runs, steps] at each step, and fewer at the beginning."""
    return np.stack([values[:, max(0, i + 1 - window) : i + 1].mean(axis=1) for i in range(values.shape[1])], axis=1)


def _band(values: np.ndarray, kind: str) -> Band:
    """The band of `values` [runs, steps] over the runs; NaN if a run is nonfinite."""
    values = np.where(np.isfinite(values).all(axis=0), values, np.nan)
    if kind == "std":
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else 0 * values[0]
        return Band(values.mean(axis=0), 2 * spread)
    low, high = values.min(axis=0), values.max(axis=0)
    return Band((low + high) / 2, (high - low) / 2)


def _in_bands(reference: Band, other: Band, tolerance: float | None) -> np.ndarray:
    """Divides the difference of the centers, other - reference, by the sum of both `half`, at each step.

    With a tolerance (not None), the divisor is the tolerance times the larger magnitude of the two centers. The groups
    are apart where the result is above 1 in magnitude. It is inf where only one center is finite, and 0 where neither
    is.
    """
    difference = other.center - reference.center
    none = reference.half + other.half
    if tolerance is not None:
        none = tolerance * np.maximum(np.abs(reference.center), np.abs(other.center))
    units = np.divide(difference, none, out=np.copysign(np.inf, difference), where=none > 0)
    units = np.where(difference == 0, 0.0, units)
    only_one = np.isnan(reference.center) != np.isnan(other.center)
    return np.where(only_one, np.inf, np.where(np.isnan(difference), 0.0, units))


def _contrast(values: Sequence[np.ndarray], kind: str, tolerance: float | None) -> Contrast:
    """The contrast of the values [runs] of two groups, the reference first."""
    bands = [_band(group[:, None], kind) for group in values]
    units = float(_in_bands(bands[0], bands[1], tolerance)[0])
    reference, other = (Band(float(band.center[0]), float(band.half[0])) for band in bands)
    seeds = _seeds(values[0]), _seeds(values[1])
    return Contrast(reference, other, seeds, seeds[1].mean - seeds[0].mean, units)


def _seeds(values: np.ndarray) -> Seeds:
    with np.errstate(invalid="ignore"):  # inf - inf
        return Seeds(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None)
