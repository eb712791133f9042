"""What repairs a step: the smallest set of rules, and a loss scale beside them."""

from collections.abc import Callable, Sequence

import jax

from mpjax.diagnosis.health import Reference, is_repaired
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.rules import is_in, pattern_of, with_rules
from mpjax.diagnosis.scales import scale_beside_rules
from mpjax.diagnosis.search import smallest_repair
from mpjax.diagnosis.trace import Trace
from mpjax.diagnosis.verdict import Finding
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy


def smallest_rules(
    make: Callable[[Policy], Program],
    policy: Policy,
    program: Program,
    trace: Trace,
    scale: float,
    reference: Reference,
) -> dict[str, str]:
    """Rules under which the step, traced anew, is repaired, and under no part of them; empty if there are none."""

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


def with_lower_scale(
    finding: Finding,
    rules: dict[str, str],
    make: Callable[[Policy], Program],
    policy: Policy,
    program: Program,
    trace: Trace,
    scale: float,
    reference: Reference,
) -> tuple[Finding, dict[str, str]]:
    """Fewer rules and a lower loss scale, where the step overflows backward too and for that alone."""
    if len(rules) == 1 or finding.verdict != "overflow" or scale <= 1:
        return finding, rules
    lower = scale_beside_rules(reference, program, trace, scale)
    fewer = smallest_rules(make, policy, program, trace, lower, reference) if lower else {}
    if not fewer or (rules and len(fewer) >= len(rules)):
        return finding, rules
    evidence = f"{finding.evidence} With that repaired, the loss scale of {scale:g} is too high; {lower:g} is not."
    return finding._replace(better_scale=lower, evidence=evidence), fewer


def is_repaired_outside(program: Program, scale: float, reference: Reference) -> bool:
    """Whether the step, emulated, is repaired by float32 in all that no rule reaches: what is outside of modules."""
    modules = [module for module in program.modules if module]
    return is_repaired(reference, program, scale, lambda path: any(is_in(path, module) for module in modules))
