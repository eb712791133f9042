"""The policy that leaves most to half precision and keeps a step within a tolerance of float32's."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax import strict_json
from mpjax.diagnosis.health import (
    ROUNDING,
    WITHOUT_ROUNDING,
    Reference,
    all_finite,
    is_repaired,
    loss_error,
    outputs_of,
)
from mpjax.diagnosis.one_step import check_numbers, float32_share
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.repair import Fault, smallest_rules
from mpjax.diagnosis.search import flags_of, with_rules
from mpjax.diagnosis.trace import run
from mpjax.errors import UsageError
from mpjax.precision.policy import PRESETS, Policy, get_policy


SCALES = (2.0**15, 2.0**10, 2.0**5, 1.0)
"""Loss scales that a step in float16 is tried with; a dynamic scale finds the largest that is finite by itself."""


class Candidate(NamedTuple):
    """A policy that was tried.

    Attributes:
      preset: its name.
      rules: to add to it: module path to "float32".
      within: whether the step, run under them, is within the tolerance.
      float32_flops: share of the products' operations that the rules keep in float32.
      loss_scale: with which it was tried; 1 for none.
      loss_error: relative error of the loss.
      gradient_error: relative error of all gradients together, in the Euclidean norm.
    """

    preset: str
    rules: dict[str, str]
    within: bool
    float32_flops: float
    loss_scale: float
    loss_error: float
    gradient_error: float

    @property
    def flags(self) -> str:
        """As train.py takes it."""
        return f"--precision.policy {self.preset} {flags_of(self.rules)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Fastest:
    """What `fastest_policy` found.

    Attributes:
      best: the policy to take; None if none within the tolerance has a product in half precision.
      tried: all that were tried, the most half precision first.
      tolerance: largest relative error of the loss, and largest share of a gradient's norm lost to zero.
    """

    best: Candidate | None
    tried: tuple[Candidate, ...]
    tolerance: float

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """All of it as JSON text, also written to `file` if given; inf and nan as text."""
        fields = {
            "best": self.best and self.best._asdict(),
            "tried": [candidate._asdict() for candidate in self.tried],
            "tolerance": self.tolerance,
        }
        text = strict_json.encode(fields, indent=2)
        if file is not None:
            pathlib.Path(file).write_text(text + "\n")
        return text

    def __str__(self) -> str:
        best = self.best.flags if self.best else "none but float32"
        lines = [f"fastest policy within {self.tolerance:g}: {best}"]
        for candidate in self.tried:
            errors = f"loss off by {candidate.loss_error:.2g}, gradients by {candidate.gradient_error:.2g}"
            if not math.isfinite(candidate.loss_error + candidate.gradient_error):
                errors = "not finite"
            kept = f", {candidate.float32_flops:.1%} of the products' work in float32" if candidate.rules else ""
            scale = f", loss scale {candidate.loss_scale:g}" if candidate.loss_scale != 1 else ""
            answer = "yes" if candidate.within else "no "
            lines.append(f"  {answer} {candidate.preset:<14}  {errors}{kept}{scale}")
        return "\n".join(lines)


def fastest_policy(model, loss_fn: Callable, batch, *, tolerance: float = 0.05) -> Fastest:
    """Looks for the policy that leaves most to half precision, for one training step of a Flax NNX model.

    Tried are float16 and bfloat16: also for the parameters, with float32 masters; for computing alone; and, if none of
    these will do, for computing with the smallest set of modules in float32.

    Args:
      model: as of `mpjax.diagnose`, in the mode it is in; it is left as it is.
      loss_fn: `loss_fn(model, batch)`, a scalar, or a pair of it and more.
      batch: a pytree of arrays.
      tolerance: largest relative error of the loss, and largest share of a gradient's norm lost to zero.

    Raises:
      UsageError: the step is not finite in float32.
    """
    return fastest_program(lambda policy: program_of_model(model, loss_fn, batch, policy), tolerance)


def fastest_policy_of_function(loss_fn: Callable, params, batch, *, tolerance: float = 0.05) -> Fastest:
    """As `fastest_policy`, for a function of parameters and batch under autocast, whose parameters stay as they are."""
    presets = ("mixed_bfloat16", "mixed_float16")
    return fastest_program(lambda policy: program_of_function(loss_fn, params, batch, policy), tolerance, presets)


def fastest_program(
    make: Callable[[Policy], Program],
    tolerance: float,
    presets: Sequence[str] = ("bfloat16", "float16", "mixed_bfloat16", "mixed_float16"),
) -> Fastest:
    """As `fastest_policy`, for whatever makes the step's program under a policy.

    Args:
      make: policy to program.
      tolerance: as of `fastest_policy`.
      presets: those to try, the most half precision first; of equals that which needs no loss scale.
    """
    check_numbers(tolerance=tolerance)
    policies = {preset.name: preset.policy for preset in PRESETS if preset.name in presets}
    full = make(get_policy("float32"))
    reference = Reference(full, outputs_of(WITHOUT_ROUNDING, full, 1.0), tolerance)
    if not all_finite(reference.outputs):
        raise UsageError("the step is not finite in float32: no policy repairs it; mpjax.diagnose says where it begins")
    tried = [_tried(make, name, policies[name], {}, reference) for name in presets]
    if not any(candidate.within for candidate in tried):
        for name in presets[-2:]:
            program = make(policies[name]).beside(full)
            scale = _scale(program, name)
            fault = Fault(make, policies[name], program, run(program, scale), scale, reference)
            rules = smallest_rules(fault)
            if rules:
                tried.append(_tried(make, name, policies[name], rules, reference))
    # Of those with rules, the most products in half; min takes the first of equals.
    within = [candidate for candidate in tried if candidate.within and candidate.float32_flops < 1]
    return Fastest(min(within, key=lambda candidate: candidate.float32_flops, default=None), tuple(tried), tolerance)


def _tried(
    make: Callable[[Policy], Program], name: str, policy: Policy, rules: dict, reference: Reference
) -> Candidate:
    program = make(with_rules(policy, rules))
    scale = _scale(program, name)
    low = outputs_of(ROUNDING, program, scale)
    return Candidate(
        preset=name,
        rules=rules,
        within=is_repaired(reference, program, scale),
        float32_flops=float32_share(program, rules),
        loss_scale=scale,
        loss_error=loss_error(reference.outputs[0], low[0] / scale),
        gradient_error=reference.gradient_error(low, scale),
    )


def _scale(program: Program, name: str) -> float:
    """The first of `SCALES` with which the step is finite; 1 where bfloat16 needs none."""
    if "bfloat16" in name:
        return 1.0
    return next((scale for scale in SCALES if all_finite(outputs_of(ROUNDING, program, scale))), 1.0)
