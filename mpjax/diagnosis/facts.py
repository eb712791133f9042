"""What a diagnosis says, as a value: the verdict with its evidence, what to change, and the table behind it."""

import dataclasses
import json
from typing import NamedTuple

from mpjax.diagnosis.search import decides_after, flags_of
from mpjax.diagnosis.trace import Row


class ScaleStep(NamedTuple):
    """The loss scale of a run at one step, and whether that step was skipped."""

    step: int
    scale: float
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """Whether precision is to blame, where, and what to change. Its attributes are those of `Diagnosis`."""

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
