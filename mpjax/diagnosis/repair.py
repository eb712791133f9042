"""Repairs a step with the smallest set of rules, and with a lower loss scale."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from mpjax.diagnosis.finding import Finding
from mpjax.diagnosis.health import Reference, is_repaired
from mpjax.diagnosis.pairs import Place
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.scales import scale_beside_rules
from mpjax.diagnosis.search import is_in, pattern_of, smallest_repair, with_rules
from mpjax.diagnosis.trace import Trace
from mpjax.errors import UsageError
from mpjax.precision.casting.one_equation import source_of
from mpjax.precision.policy import Policy


class Fault(NamedTuple):
    """A step to repair.

    Attributes:
      make: a function from policy to the step's program.
      policy: the policy to repair.
      program: the step under the policy.
      trace: the emulated run of the step.
      scale: the loss scale.
      reference: the float32 step to compare with.
    """

    make: Callable[[Policy], Program]
    policy: Policy
    program: Program
    trace: Trace
    scale: float
    reference: Reference


def smallest_rules(fault: Fault) -> dict[str, str]:
    """Finds rules that repair the step when it is traced with them, and of which none can be left out.

    The rules say "float32" or, if it is enough that the modules are out of float8, the policy's compute dtype. Rules
    with which the step cannot be traced, because of mixed dtypes, count as no repair. So do rules with which a rule of
    the policy has no effect.

    Returns:
      A dict from the pattern of a module path to a dtype; empty if no rules repair the step.
    """
    make, policy, program, trace, scale, reference = fault

    def rules_for(modules: Sequence[str], dtype: str = "float32") -> dict[str, str]:
        # A module's rule covers its submodules, and a rule without effect is an error.
        inner = {m for m in modules for other in modules if m != other and is_in(m, other)}
        return {pattern_of(module): dtype for module in modules if module not in inner}

    def under_rules(modules: Sequence[str], dtype: str = "float32") -> bool:
        try:
            rules = with_rules(policy, rules_for(modules, dtype))
            ruled = make(rules)._replace(progress=program.progress.verifying())
        except (TypeError, jax.dtypes.TypePromotionError):
            return False  # a loop, a branch or, with strict promotion, an operation does not accept mixed dtypes
        except UsageError:
            return False  # a wildcard rule of the policy no longer has an effect
        return is_repaired(reference, ruled, scale)

    modules = smallest_repair(program, trace, scale, reference, under_rules) or ()
    compute = str(policy.compute_dtype)
    if modules and policy.recipes and compute != "float32" and under_rules(modules, compute):
        return rules_for(modules, compute)  # out of float8 is enough
    return rules_for(modules)


def with_lower_scale(finding: Finding, rules: dict[str, str], fault: Fault) -> tuple[Finding, dict[str, str]]:
    """Tries a lower loss scale, with which fewer rules may repair an overflow.

    Returns the finding, with `better_scale` and a sentence more in its evidence, and the fewer rules. If there is no
    such scale, returns both arguments unchanged.

    If there are no rules, any rules are an improvement. Nothing is searched with one rule or a loss scale of at most 1.
    """
    if len(rules) == 1 or finding.verdict != "overflow" or fault.scale <= 1:
        return finding, rules
    lower = scale_beside_rules(fault.reference, fault.program, fault.trace, fault.scale)
    fewer = smallest_rules(fault._replace(scale=lower)) if lower else {}
    if not fewer or (rules and len(fewer) >= len(rules)):
        return finding, rules
    too_high = f"With that repaired, the loss scale of {fault.scale:g} is too high; at {lower:g} the step is healthy."
    evidence = f"{finding.evidence} {too_high}"
    return finding._replace(better_scale=lower, evidence=evidence), fewer


def is_repaired_at(source: str, program: Program, scale: float, reference: Reference) -> bool:
    """True if the emulated step is healthy when the line of code `source`, `file:line`, computes in float32.

    The results of that line are rounded when other operations use them.
    """

    def stands_there(eqn, place: Place) -> bool:
        return source_of((eqn, *place.callers)) == source

    return is_repaired(reference, program, scale, keeps=stands_there)


def is_repaired_outside(program: Program, scale: float, reference: Reference) -> bool:
    """True if the emulated step is healthy when everything outside of modules is in float32, such as the loss."""
    modules = [module for module in program.modules if module]
    return is_repaired(reference, program, scale, lambda path: any(is_in(path, module) for module in modules))
