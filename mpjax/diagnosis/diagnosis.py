"""What `diagnose` returns: a verdict with its evidence, what to change, and the table behind it."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from mpjax import strict_json
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.diagnosis.rows import Row
from mpjax.diagnosis.rules import decides_after, flags_of
from mpjax.diagnosis.wording import rich_of, text_of


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
      path: module path where it begins, or the parameter's whose update it is; None if healthy or unknown.
      direction: "forward", "backward" or "update"; None if healthy or unknown.
      operation: the primitive; None if healthy or unknown.
      source: file and line; None if healthy or unknown.
      evidence: one paragraph.
      rules: to add to the policy: pattern of a module's path to "float32"; empty if none are needed or none help.
      better_scale: a loss scale with which the step is healthy, under the rules if there are some; None if none is
        needed or none helps.
      verified: whether what is advised was run and is healthy: the better scale, the rules, float32 parameters.
      float32_flops: share of the products' operations that leave half precision under the rules.
      advice: what to do, one line each.
      table: one row for each module and direction, in program order, and for each parameter's update.
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
        fields["table"] = [row._asdict() | {"dtype": row.dtype.name} for row in self.table]
        fields["exponents"] = [EXPONENTS.start, EXPONENTS.stop]
        text = strict_json.encode(fields, indent=2)
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
        scale = [] if self.better_scale is None else [f'[precision]\nloss_scale = "{self.better_scale:.10g}"']
        lines = [f'{json.dumps(path, ensure_ascii=False)} = "{dtype}"' for path, dtype in self.rules.items()]
        return "\n".join([*scale, *(["[precision.rules]", *lines] if lines else [])])

    @property
    def flags(self) -> str:
        """The same as flags of the command line."""
        scale = [] if self.better_scale is None else [f"--precision.loss_scale {self.better_scale:.10g}"]
        return " ".join([*scale, *filter(None, [flags_of(self.rules)])])

    @property
    def repaired_policy(self) -> str:
        """The policy with the rules, for `apply_policy` and `autocast`; empty if there are no rules."""
        if not self.rules:
            return ""
        dtypes, *own = self.policy.split(";")
        kept = [rule for rule in own if decides_after(self.rules, rule.partition("=")[0])]
        return ";".join([dtypes, *(f"{path}={dtype}" for path, dtype in self.rules.items()), *kept])

    @property
    def headline(self) -> str:
        """The verdict and its place."""
        place = "" if self.path is None else f" in {self.path or 'no module'} ({self.direction}, {self.operation})"
        return f"verdict: {self.verdict}{place}"

    def __str__(self) -> str:
        return text_of(self)

    def __rich__(self):
        return rich_of(self)
