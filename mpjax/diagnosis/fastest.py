"""Searches for the policy with the most half precision that keeps a step within a tolerance of float32."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpjax import notebook, strict_json
from mpjax.diagnosis.float8_search import Float8Layers, float8_layers
from mpjax.diagnosis.health import (
    ROUNDING,
    WITHOUT_ROUNDING,
    Reference,
    all_finite,
    is_repaired,
    loss_error,
    outputs_of,
)
from mpjax.diagnosis.one_step import check_numbers, float32_fraction
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.repair import Fault, smallest_rules
from mpjax.diagnosis.search import flags_of, with_rules
from mpjax.diagnosis.trace import emulated
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.precision.presets import PRESETS, get_policy


SCALES = (2.0**15, 2.0**10, 2.0**5, 1.0)
"""The loss scales to try with float16, largest first. Dynamic loss scaling also finds the largest finite scale."""


class Candidate(NamedTuple):
    """A policy that was tried on a step, with its errors against float32.

    Attributes:
      preset: the name of the preset.
      rules: the rules to add to the preset, from module path to "float32".
      within: True if the step under this policy is within the tolerance.
      float32_flops: the fraction of the FLOPs of matrix products, convolutions and fused attention that the rules keep
        in float32.
      loss_scale: the loss scale of the trial; 1 means no scaling.
      loss_error: the relative error of the loss; inf or NaN if the step is not finite.
      gradient_error: the relative error of all gradients together, in the Euclidean norm.
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
        """The preset and its rules as flags of train.py, without the loss scale."""
        return f"--precision.policy {self.preset} {flags_of(self.rules)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Fastest:
    """The result of `fastest_policy`.

    Attributes:
      best: the policy within the tolerance with the least `float32_flops`, the first tried among equals; None if no
        policy is within the tolerance, or only with all FLOPs in float32.
      tried: all policies that were tried, in order.
      tolerance: the largest accepted relative error of the loss, and the largest accepted fraction of a gradient's norm
        that underflows to zero.
      float8: the layers that can multiply in float8; None if they were not searched. They are not part of `best`,
        because their speed depends on the GPU.
    """

    best: Candidate | None
    tried: tuple[Candidate, ...]
    tolerance: float
    float8: Float8Layers | None = None

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """Encodes all fields as JSON, with inf and nan as strings, and writes them to `file` if given.

        Returns the text.
        """
        fields = {
            "best": self.best and self.best._asdict(),
            "tried": [candidate._asdict() for candidate in self.tried],
            "tolerance": self.tolerance,
            "float8": self.float8
            and {**vars(self.float8), "layers": [layer._asdict() for layer in self.float8.layers]},
        }
        return strict_json.export(fields, file)

    _repr_pretty_ = notebook.as_text

    def __str__(self) -> str:
        best = self.best.flags if self.best else "only float32"
        lines = [f"fastest policy within {self.tolerance:g}: {best}"]
        for candidate in self.tried:
            errors = f"loss error {candidate.loss_error:.2g}, gradient error {candidate.gradient_error:.2g}"
            if not math.isfinite(candidate.loss_error + candidate.gradient_error):
                errors = "not finite"
            kept = f", {candidate.float32_flops:.1%} of the FLOPs in float32" if candidate.rules else ""
            scale = f", loss scale {candidate.loss_scale:g}" if candidate.loss_scale != 1 else ""
            answer = "yes" if candidate.within else "no "
            lines.append(f"  {answer} {candidate.preset:<14}  {errors}{kept}{scale}")
        return "\n".join([*lines, *([str(self.float8)] if self.float8 else [])])


def fastest_policy(model, loss_fn: Callable, batch, *, tolerance: float = 0.05) -> Fastest:
    """Searches for the policy with the most half precision, for one training step of a Flax NNX model.

    The search tries bfloat16 and float16, first as the parameter dtype too (with float32 master weights), then as the
    compute dtype alone. If no policy is within the tolerance, it tries the compute dtypes again with the smallest set
    of modules in float32. It also searches for the layers that can multiply in float8. Nothing is timed: fewer FLOPs in
    float32 count as faster.

    Args:
      model: an NNX module, in training or evaluation mode. It is not modified, and its own dtypes do not matter.
      loss_fn: `loss_fn(model, batch)`; returns a scalar, or a pair of the scalar and auxiliary values.
      batch: a pytree of arrays.
      tolerance: the largest accepted relative error of the loss, and the largest accepted fraction of a gradient's norm
        that underflows to zero. A larger error of a loss near zero is accepted if all gradients together are off by at
        most half their norm. If the loss is right, other errors of gradients are not limited (`gradient_error`).

    Returns:
      A `Fastest`: the best policy (None if only float32 will do), all policies that were tried, and the layers for
      float8. It prints as text.

    Raises:
      UsageError: the step is not finite in float32, the model is not an NNX module, the loss is not a floating scalar,
        or the tolerance is not positive and finite.
    """
    return fastest_program(lambda policy: program_of_model(model, loss_fn, batch, policy), tolerance)


def fastest_policy_of_function(loss_fn: Callable, params, batch, *, tolerance: float = 0.05) -> Fastest:
    """Searches like `fastest_policy`, for a function of parameters and batch under autocast.

    `loss_fn(params, batch)` is as in `diagnose_function`. The parameter dtypes do not change: the search tries the
    compute dtype alone.

    Raises:
      UsageError: the step is not finite in float32, the loss is not a floating scalar, or the tolerance is not positive
        and finite.
    """
    presets = ("mixed_bfloat16", "mixed_float16")
    return fastest_program(lambda policy: program_of_function(loss_fn, params, batch, policy), tolerance, presets)


def fastest_program(
    make: Callable[[Policy], Program],
    tolerance: float,
    presets: Sequence[str] = ("bfloat16", "float16", "mixed_bfloat16", "mixed_float16"),
) -> Fastest:
    """Searches like `fastest_policy`, for the program that `make` returns for a policy.

    Args:
      make: a function from policy to the step's program.
      tolerance: as in `fastest_policy`.
      presets: the presets to try, the most half precision first; among equals, presets without a loss scale first. If
        none is within the tolerance, the last two are tried with rules.

    Returns:
      A `Fastest`.

    Raises:
      UsageError: the step is not finite in float32, or the tolerance is not positive and finite.
    """
    check_numbers(tolerance=tolerance)
    policies = {preset.name: preset.policy for preset in PRESETS if preset.name in presets}
    full = make(get_policy("float32"))
    reference = Reference(full, outputs_of(WITHOUT_ROUNDING, full, 1.0), tolerance)
    if not all_finite(reference.outputs):
        raise UsageError("the step is not finite in float32, so no policy repairs it; mpjax.diagnose says where")
    tried = [_tried(make, name, policies[name], {}, reference) for name in presets]
    if not any(candidate.within for candidate in tried):
        for name in presets[-2:]:
            program = make(policies[name]).beside(full)
            scale = _scale(program, name)
            fault = Fault(make, policies[name], program, emulated(program, scale), scale, reference)
            rules = smallest_rules(fault)
            if rules:
                tried.append(_tried(make, name, policies[name], rules, reference))
    # Fewest FLOPs in float32 wins. On a tie min returns the first in order.
    within = [candidate for candidate in tried if candidate.within and candidate.float32_flops < 1]
    best = min(within, key=lambda candidate: candidate.float32_flops, default=None)
    return Fastest(best, tuple(tried), tolerance, float8_layers(make, reference))


def _tried(
    make: Callable[[Policy], Program], name: str, policy: Policy, rules: dict, reference: Reference
) -> Candidate:
    """Emulates the step under a preset and rules, and measures its errors."""
    program = make(with_rules(policy, rules))
    scale = _scale(program, name)
    low = outputs_of(ROUNDING, program, scale)
    return Candidate(
        preset=name,
        rules=rules,
        within=is_repaired(reference, program, scale),
        float32_flops=float32_fraction(program, rules),
        loss_scale=scale,
        loss_error=loss_error(reference.outputs[0], low[0] / scale),
        gradient_error=reference.gradient_error(low, scale),
    )


def _scale(program: Program, name: str) -> float:
    """The first of `SCALES` with which the step is finite; 1 if none is.

    Presets of bfloat16 need no loss scale: for them the result is always 1.
    """
    if "bfloat16" in name:
        return 1.0
    return next((scale for scale in SCALES if all_finite(outputs_of(ROUNDING, program, scale))), 1.0)
