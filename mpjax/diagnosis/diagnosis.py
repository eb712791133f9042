"""Defines `Diagnosis`, the result of `diagnose`, which prints as text and exports to JSON and HTML."""

import dataclasses
import pathlib
from collections.abc import Sequence

from mpjax import notebook, strict_json
from mpjax.diagnosis.facts import Facts, ScaleStep
from mpjax.diagnosis.readings import EXPONENTS
from mpjax.diagnosis.render.page import cell_of, page_of
from mpjax.diagnosis.render.text import rich_of, text_of


@dataclasses.dataclass(frozen=True)
class Diagnosis(Facts):
    """The result of a diagnosis: whether precision is the cause, where, and what to change.

    `print` shows it as text, `rich.print` and a notebook as a table.

    Attributes:
      verdict: "healthy", "overflow", "underflow", "rounding", "loss_scale" (too high) or "not_precision".
      path: the module path where the fault begins, or the path of the parameter whose update has the fault; empty
        outside all modules; None if healthy or unknown.
      direction: "forward", "backward" or "update"; None if healthy or unknown.
      operation: the primitive, or another operation as in `Site`; None if healthy or unknown.
      source: the file and line, or "(no source line)", as for a parameter; None if healthy or unknown.
      evidence: one paragraph with the numbers behind the verdict.
      rules: the rules to add to the policy, from the pattern of a module path to "float32" or, if it is enough that the
        modules are out of float8, to the compute dtype; empty if none are needed or none help.
      better_scale: a loss scale with which the step is healthy, under the rules if there are any; None if none is
        needed or none helps.
      verified: True if the step was run with the advice (the better scale, the rules, or float32 parameters) and is
        healthy; False also if there is nothing to repair or no repair was found.
      float32_flops: the fraction of the FLOPs of matrix products, convolutions and fused attention that the rules move
        to float32.
      advice: the recommended changes, one line each.
      table: one row for each module and direction, in program order, and one for each parameter's update, if computed.
      policy: the policy, as text.
      loss_scale: the loss scale of the diagnosed step.
      loss: the loss of the step in half precision, and in float32; neither multiplied by the loss scale.
      flushed: the fraction of gradient values that are zero in half precision and not in float32, by parameter.
      reason: the failure in float32, for "not_precision"; empty for other verdicts, and for an index out of range.
    """

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """Encodes all fields as JSON, and writes them to `file` if given. Returns the text.

        Inf and nan become strings: "Infinity", "-Infinity" and "NaN".

        "exponents" has two numbers: the base-2 exponent of the first bin of the table's histograms, and the exponent
        after the last bin.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["table"] = [row._asdict() | {"dtype": row.dtype.name} for row in self.table]
        fields["exponents"] = [EXPONENTS.start, EXPONENTS.stop]
        return strict_json.export(fields, file)

    def to_html(self, file: str | pathlib.Path | None = None, *, scales: Sequence[tuple[int, float, bool]] = ()) -> str:
        """Renders a self-contained HTML page, writes it to `file` if given, and returns its text.

        Args:
          file: the file to write; None to write none.
          scales: `(step, loss scale, skipped)` for steps of a run, in order, plotted as a curve; empty for no plot.
        """
        text = page_of(self, [ScaleStep(*step) for step in scales])
        if file is not None:
            pathlib.Path(file).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return text_of(self)

    def __rich__(self):
        return rich_of(self)

    def _repr_html_(self) -> str:
        return cell_of(self)

    _repr_pretty_ = notebook.as_text
