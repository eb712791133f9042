"""What `diagnose` returns: facts that print, and that write themselves as JSON and as a page."""

import dataclasses
import pathlib
from collections.abc import Sequence

from mpjax import strict_json
from mpjax.diagnosis.facts import Facts, ScaleStep
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.diagnosis.render.page import page_of
from mpjax.diagnosis.render.text import rich_of, text_of


@dataclasses.dataclass(frozen=True)
class Diagnosis(Facts):
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
        text = page_of(self, [ScaleStep(*step) for step in scales])
        if file is not None:
            pathlib.Path(file).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return text_of(self)

    def __rich__(self):
        return rich_of(self)
