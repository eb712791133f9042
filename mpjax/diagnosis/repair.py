"""What repairs a step: the smallest set of rules, and a loss scale beside them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from mpjax.diagnosis.health import Reference, is_repaired
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.scales import scale_beside_rules
from mpjax.diagnosis.search import is_in, pattern_of, smallest_repair, with_rules
from mpjax.diagnosis.trace import Trace
from mpjax.diagnosis.verdict import Finding
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy


class Fault(NamedTuple):
    """A step that is to be repaired.

    Attributes:
      make: policy to program.
      policy: the policy in question.
      program: the step under it.
      trace: what is wrong with it.
      scale: the loss scale.
      reference: what it is held against.
    """

    make: Callable[[Policy], Program]
    policy: Policy
    program: Program
    trace: Trace
    scale: float
    reference: Reference


def smallest_rules(fault: Fault) -> dict[str, str]:
    """Returns rules that repair the step, traced anew, and no part of which does; empty if there are none."""
    make, policy, program, trace, scale, reference = fault

    def rules_for(modules: Sequence[str]) -> dict[str, str]:
        # A module's rule decides for all in it, and a rule that decides nothing is an error.
        inner = {m for m in modules for other in modules if m != other and is_in(m, other)}
        return {pattern_of(module): "float32" for module in modules if module not in inner}

    def under_rules(modules: Sequence[str]) -> bool:
        try:
            ruled = make(with_rules(policy, rules_for(modules)))._replace(progress=program.progress.verifying())
        except (TypeError, jax.dtypes.TypePromotionError):
            return False  # a loop, a branch or, where promotion is strict, an operation that needs one dtype throughout
        except UsageError:
            return False  # a rule of the policy with a wildcard, for which nothing is left to decide
        return is_repaired(reference, ruled, scale)

    return rules_for(smallest_repair(program, trace, scale, reference, under_rules) or ())


def with_lower_scale(finding: Finding, rules: dict[str, str], fault: Fault) -> tuple[Finding, dict[str, str]]:
    """Returns fewer rules and a lower loss scale, where the step overflows backward too; else what it was given."""
    if len(rules) == 1 or finding.verdict != "overflow" or fault.scale <= 1:
        return finding, rules
    lower = scale_beside_rules(fault.reference, fault.program, fault.trace, fault.scale)
    fewer = smallest_rules(fault._replace(scale=lower)) if lower else {}
    if not fewer or (rules and len(fewer) >= len(rules)):
        return finding, rules
    too_high = f"With that repaired, the loss scale of {fault.scale:g} is too high; {lower:g} is not."
    evidence = f"{finding.evidence} {too_high}"
    return finding._replace(better_scale=lower, evidence=evidence), fewer


def is_repaired_outside(program: Program, scale: float, reference: Reference) -> bool:
    """Returns whether the step, emulated, is repaired by float32 in all that is outside of modules."""
    modules = [module for module in program.modules if module]
    return is_repaired(reference, program, scale, lambda path: any(is_in(path, module) for module in modules))
