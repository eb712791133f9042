"""Defines the fields of a diagnosis, and formats its repair for a config file, a command line or a policy."""

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple, Self

from mpjax.diagnosis.search import decides_after, flags_of
from mpjax.diagnosis.trace import TraceRow


class ScaleStep(NamedTuple):
    """The loss scale at one step of a run.

    Attributes:
      step: the number of the attempted step.
      scale: the loss scale.
      skipped: True if the step was skipped, because its gradients were not finite.
    """

    step: int
    scale: float
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """The fields of a `Diagnosis`, which documents them."""

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
    table: tuple[TraceRow, ...]
    policy: str
    loss_scale: float
    loss: tuple[float, float]
    flushed: dict[str, float]
    reason: str = ""

    def beyond_dtypes(self, reason: str, numbers: str, advice: Sequence[str]) -> Self:
        """Copies the diagnosis with the verdict "not_precision", for a failure that was found in float32 too.

        The copy has no rules and no better scale. Its evidence ends in a new sentence, "But REASON: NUMBERS."

        Args:
          reason: the failure, not empty. It is also the headline of the HTML page. In the sentence, "But" comes before
            it unless the verdict was "not_precision" already.
          numbers: the numbers behind it, for the sentence.
          advice: the new advice, which replaces the old.
        """
        clause = reason if self.verdict == "not_precision" else f"But {reason[0].lower()}{reason[1:]}"
        return dataclasses.replace(
            self,
            verdict="not_precision",
            reason=reason,
            evidence=f"{self.evidence} {clause}: {numbers}.",
            rules={},
            better_scale=None,
            verified=False,
            float32_flops=0.0,
            advice=tuple(advice),
        )

    @property
    def worst(self) -> list[TraceRow]:
        """The rows of the table, sorted by `TraceRow.harm`, the most harmful first."""
        return sorted(self.table, key=lambda row: row.harm, reverse=True)

    @property
    def toml(self) -> str:
        """The better loss scale and the rules as TOML, to paste into a config file; empty if there is neither.

        The tables are `[precision]` and `[precision.rules]`.
        """
        scale = [] if self.better_scale is None else [f'[precision]\nloss_scale = "{self.better_scale:.10g}"']
        lines = [f'{json.dumps(path, ensure_ascii=False)} = "{dtype}"' for path, dtype in self.rules.items()]
        return "\n".join([*scale, *(["[precision.rules]", *lines] if lines else [])])

    @property
    def flags(self) -> str:
        """The better loss scale and the rules as command-line flags, quoted for a shell; empty if there is neither."""
        scale = [] if self.better_scale is None else [f"--precision.loss_scale {self.better_scale:.10g}"]
        return " ".join([*scale, *filter(None, [flags_of(self.rules)])])

    @property
    def repaired_policy(self) -> str:
        """The policy with the diagnosis's rules before its own, as text for `apply_policy` and `autocast`.

        Its own rules that no longer have an effect are dropped. The text is empty if the diagnosis has no rules.
        """
        if not self.rules:
            return ""
        dtypes, *policy_rules = self.policy.split(";")
        kept = [rule for rule in policy_rules if decides_after(self.rules, rule.partition("=")[0])]
        return ";".join([dtypes, *(f"{path}={dtype}" for path, dtype in self.rules.items()), *kept])

    @property
    def headline(self) -> str:
        """One line, "verdict: overflow in layers/0 (forward, mul)"; only the verdict if the module is not known."""
        location = "" if self.path is None else f" in {self.path or 'no module'} ({self.direction}, {self.operation})"
        return f"verdict: {self.verdict}{location}"
