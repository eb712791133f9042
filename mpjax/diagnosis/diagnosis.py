"""What `diagnose` returns: a verdict with its evidence, what to change, and the table behind it."""

import dataclasses
import json
import math
import pathlib
import shlex
from collections.abc import Sequence
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
      non_finite: share of values that are inf or nan and are not in float32, those of earlier modules included.
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

    @property
    def exponents(self) -> tuple[int, int] | None:
        """Powers of two of the smallest and the largest magnitude seen; None if all was zero."""
        seen = [e for e, count in zip(EXPONENTS, self.histogram, strict=True) if count]
        if self.largest > 0:
            seen.append(math.frexp(self.largest)[1] - 1)
        return (min(seen), max(seen)) if seen else None

    @property
    def harm(self) -> tuple[float, float]:
        """Larger where more went wrong: overflow first, then what became zero and the module's own error."""
        own = self.error if self.own_error is None else self.own_error
        return self.overflow, self.underflow + min(own, 1.0)


class ScaleStep(NamedTuple):
    """The loss scale of a run at one step, and whether that step was skipped."""

    step: int
    scale: float
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Whether precision is to blame, where, and what to change. Prints as text, and in rich as a table.

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

    def to_html(self, file: str | pathlib.Path | None = None, *, scales: Sequence[tuple[int, float, bool]] = ()) -> str:
        """All of it as one HTML page that needs nothing else, also written to `file` if given.

        Args:
          file: where to write it.
          scales: `(step, loss scale, skipped)` of the run it comes from, drawn as a curve.
        """
        from mpjax.diagnosis.page import page_of

        text = page_of(self, [ScaleStep(*step) for step in scales])
        if file is not None:
            pathlib.Path(file).write_text(text, encoding="utf-8")
        return text

    @property
    def worst(self) -> list[Row]:
        """The rows, most harm first."""
        return sorted(self.table, key=lambda row: row.harm, reverse=True)

    @property
    def toml(self) -> str:
        """What to paste into a config file; empty if nothing is to be changed."""
        if self.better_scale is not None:
            return f'[precision]\nloss_scale = "{self.better_scale:.10g}"'
        lines = [f'{json.dumps(path, ensure_ascii=False)} = "{dtype}"' for path, dtype in self.rules.items()]
        return "\n".join(["[precision.rules]", *lines]) if lines else ""

    @property
    def flags(self) -> str:
        """The same as flags of the command line."""
        if self.better_scale is not None:
            return f"--precision.loss_scale {self.better_scale:.10g}"
        words = [f"{_shell_word(path)} {dtype}" for path, dtype in self.rules.items()]
        return " ".join(["--precision.rules", *words]) if words else ""

    @property
    def headline(self) -> str:
        """The verdict and its place."""
        place = "" if self.path is None else f" in {self.path or 'no module'} ({self.direction}, {self.operation})"
        return f"verdict: {self.verdict}{place}"

    def __str__(self) -> str:
        lines = [self.headline, *([f"at {self.source}"] if self.source else []), self.evidence, *self.advice]
        worst = [COLUMNS, *map(row_texts, self.worst[:_SHORT])]
        widths = [max(map(len, column)) for column in zip(*worst, strict=True)]
        for cells in worst if self.table else []:
            words = [f"{c:<{w}}" if i < 3 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
            lines.append("  ".join(words).rstrip())
        return "\n".join(lines)

    def __rich__(self):
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        color = "green" if self.verdict == "healthy" else "yellow" if self.verdict == "not_precision" else "red"
        parts = [Text(self.headline, style=f"bold {color}")]
        parts += [Text(f"at {self.source}", style="dim")] if self.source else []
        parts += [Text(line) for line in (self.evidence, *self.advice)]
        if self.toml:
            parts += [Padding(Text(self.toml), (1, 2, 0, 2)), Padding(Text(self.flags), (1, 2))]
        shown = self.worst[:_LONG]
        note = f"the worst {len(shown)} of {len(self.table)} rows" if len(self.table) > _LONG else None
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", caption=note)
        for number, name in enumerate(_HEADS):
            justify = "left" if number < 3 else "right"
            table.add_column(name, justify=justify, vertical="bottom", overflow="fold", no_wrap=number > 0)
        for row in shown:
            table.add_row(*map(Text, row_texts(row)))
        return Group(*parts, table)


COLUMNS = (
    "path",
    "direction",
    "dtype",
    "log2 range",
    "overflow %",
    "underflow %",
    "subnormal %",
    "error",
    "own error",
)
"""What `row_texts` gives."""

# In rich, where a terminal of 80 columns has 14 for the path.
_HEADS = (
    "path",
    "direction",
    "dtype",
    "log2\nrange",
    "over-\nflow %",
    "under-\nflow %",
    "sub-\nnormal %",
    "error",
    "own\nerror",
)

_SHORT, _LONG = 5, 20  # rows of a table as text, in rich


def row_texts(row: Row) -> tuple[str, ...]:
    """A row for people; the error is inf where some results are inf or nan, whatever it is of the others."""
    return (
        row.path or "(no module)",
        row.direction,
        row.dtype.name,
        "all zero" if row.exponents is None else "{}..{}".format(*row.exponents),
        *map(percent, (row.overflow, row.underflow, row.subnormal)),
        "inf" if row.non_finite else error_text(row.error),
        "-" if row.own_error is None else error_text(row.own_error),
    )


def percent(share: float) -> str:
    """A share in percent: 0 only where it is exactly that, 100 likewise."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"[:-1]
    if share < 1e-4:
        return "<0.01"
    return ">99.9" if share > 0.999 else f"{100 * share:.2f}" if share < 0.1 else f"{100 * share:.1f}"


def error_text(error: float) -> str:
    """A relative error."""
    return "0" if error == 0 else f"{error:.1e}"


def _shell_word(path: str) -> str:
    return shlex.quote(path) if set(path) & set('"\\$`!') else f'"{path}"'


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
                non_finite=_share(every, "non_finite"),
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
