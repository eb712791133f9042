"""What `diagnose` returns: a verdict with its evidence, what to change, and the table behind it."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

import numpy as np

from mpjax.diagnosis.emulate import Site
from mpjax.diagnosis.readings import EXPONENTS, Reading, together
from mpjax.diagnosis.verdict import Trace


class Row(NamedTuple):
    """A module in one direction.

    Attributes:
      path: of the module; empty outside all of them.
      direction: "forward" or "backward".
      dtype: the narrowest dtype that it gives results in.
      largest: largest finite magnitude of its results.
      mean: mean magnitude of its results.
      overflow: share of values that rounding made inf, of half-precision results.
      underflow: share that rounding made zero.
      subnormal: share that rounding left with fewer bits.
      error: relative error of its results, errors of earlier modules included.
      own_error: the same with float32's inputs; None if it was not asked for.
      histogram: counts by exponent of a sample of its results in float32.
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


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Whether precision is to blame, where, and what to change. Prints as text.

    Attributes:
      verdict: "healthy", "overflow", "underflow", "rounding", "loss_scale" (too high) or "not_precision".
      path: module path where it begins; None if healthy or unknown.
      direction: "forward" or "backward"; None if healthy or unknown.
      operation: the primitive; None if healthy or unknown.
      source: file and line; None if healthy or unknown.
      evidence: one paragraph.
      rules: to add to the policy: module path to "float32"; empty if none are needed or none help.
      better_scale: a loss scale with which the step is healthy; None if none is needed or none helps.
      verified: whether a run with the better scale, or under the policy with the rules, is healthy.
      float32_flops: share of the products' operations that leave half precision under the rules.
      advice: what to do, one line each.
      table: one row for each module and direction, in program order.
      policy: the policy, as text.
      loss_scale: the loss scale.
      loss: of the step in half precision and in float32.
      flushed: share of the gradient values that are zero in half precision and not in float32, by parameter.
    """

    verdict: str
    path: str | None
    direction: str | None
    operation: str | None
    source: str | None
    evidence: str
    rules: dict[str, str]
    better_scale: float | None
    verified: bool
    float32_flops: float
    advice: tuple[str, ...]
    table: tuple[Row, ...]
    policy: str
    loss_scale: float
    loss: tuple[float, float]
    flushed: dict[str, float]

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """All of it as JSON text, also written to `file` if given; inf and nan as text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["table"] = [row._asdict() for row in self.table]
        fields["exponents"] = [EXPONENTS.start, EXPONENTS.stop]
        text = json.dumps(_plain(fields), indent=2, allow_nan=False)
        if file is not None:
            pathlib.Path(file).write_text(text + "\n")
        return text

    def __str__(self) -> str:
        place = "" if self.path is None else f" in {self.path or 'no module'} ({self.direction}, {self.operation})"
        lines = [f"verdict: {self.verdict}{place}", self.evidence, *self.advice]
        if self.source:
            lines.insert(1, f"at {self.source}")
        return "\n".join(lines)


def table_of(trace: Trace, alone: Trace | None) -> tuple[Row, ...]:
    """The rows of a run, and of one in which each module got float32's inputs."""
    grouped: dict[tuple[str, str], list[tuple[Site, Reading]]] = {}
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        grouped.setdefault((site.path, site.direction), []).append((site, reading))
    own: dict[tuple[str, str], float] = {}
    if alone is not None:
        for site, reading in zip(alone.sites, alone.readings, strict=True):
            key = site.path, site.direction
            own[key] = max(own.get(key, 0.0), reading.relative_error)
    rows = []
    for key, found in grouped.items():
        every = together(reading for _, reading in found)
        narrowest = min((site.dtype for site, _ in found), key=lambda dtype: dtype.itemsize)
        half = [r for site, r in found if site.dtype.itemsize == 2]
        rounded = together(half) if half else None
        rows.append(
            Row(
                *key,
                dtype=narrowest,
                largest=every.largest,
                mean=every.total / every.size if every.size else 0.0,
                overflow=_share(rounded, "overflow"),
                underflow=_share(rounded, "underflow"),
                subnormal=_share(rounded, "subnormal"),
                error=max(reading.relative_error for _, reading in found),
                own_error=own.get(key),
                histogram=tuple(int(count) for count in every.histogram),
            )
        )
    return tuple(rows)


def _share(reading: Reading | None, name: str) -> float:
    return getattr(reading, name) / reading.size if reading is not None and reading.size else 0.0


def _plain(value):
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
