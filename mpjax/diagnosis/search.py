"""Searches for modules: the smallest set to keep in float32, and the one at fault among several with one symptom."""

import dataclasses
import operator
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.health import Reference, is_repaired, outputs_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import Reading, Site
from mpjax.diagnosis.trace import Trace
from mpjax.precision.policy import Policy
from mpjax.precision.rules import is_typed


def is_in(path: str, module: str) -> bool:
    """True if `path` is the module `module` or one of its submodules. The module "" is the whole model."""
    return not module or f"{path}/".startswith(f"{module}/")


def pattern_of(module: str) -> str:
    """The rule pattern of a module.

    The pattern is the module path, with "?" in place of each character that is special in a pattern or in a policy's
    text. The pattern of "", the whole model, is "*".
    """
    return "".join("?" if character in "*?[=;" else character for character in module) or "*"


def covers(rules: Iterable[str], path: str) -> bool:
    """True if one of the rules, each made by `pattern_of`, is for the module `path` or a module that contains it."""
    return any(is_in(pattern_of(path), "" if pattern == "*" else pattern) for pattern in rules)


def decides_after(rules: Iterable[str], pattern: str) -> bool:
    """True if a policy's rule for `pattern` still has an effect when `rules` come before it.

    It has none if `rules` cover it, which a policy refuses as an error. A rule for a class (`type:`) always counts as
    one with an effect.

    Args:
      rules: the rules before it, each made by `pattern_of`.
      pattern: the pattern of the policy's rule.
    """
    return is_typed(pattern) or not covers(rules, pattern)


def with_rules(policy: Policy, rules: Mapping[str, str]) -> Policy:
    """Copies a policy with `rules` before its own rules, and drops those that then have no effect."""
    kept = {pattern: value for pattern, value in policy.rules.items() if decides_after(rules, pattern)}
    return dataclasses.replace(policy, rules={**rules, **kept})


def flags_of(rules: Mapping[str, str]) -> str:
    """Formats rules as the flag `--precision.rules` of a command line, quoted for a shell; empty without rules."""
    words = [f"{_shell_word(path)} {dtype}" for path, dtype in rules.items()]
    return " ".join(["--precision.rules", *words]) if words else ""


def _shell_word(path: str) -> str:
    return shlex.quote(path) if set(path) & set('"\\$`!') else f'"{path}"'


Repairs = Callable[[Sequence[str]], bool]
"""A predicate: True if keeping these modules, by path, and their submodules in float32 repairs the step."""


def smallest_repair(
    program: Program, trace: Trace, scale: float, reference: Reference, under_rules: Repairs
) -> tuple[str, ...] | None:
    """Finds a set of modules that repairs the step if all are in float32, and of which none can be left out.

    The search first emulates the step without rounding in the modules, and then tries the step that is traced under
    rules. The set need not be the smallest possible.

    Args:
      program: the step.
      trace: the emulated run of the step.
      scale: the loss scale.
      reference: the float32 step to compare with.
      under_rules: `(module paths) -> bool`, True if the step traced with float32 rules for these modules is right.

    Returns:
      Module paths in program order. ("",), the whole model, if no smaller set repairs the step. None if the whole model
      does not either.
    """

    def emulated(kept: Sequence[str]) -> bool:
        return is_repaired(reference, program, scale, lambda path: not any(is_in(path, k) for k in kept))

    rounding = {site.path for site in trace.sites if site.dtype in NARROW}
    suspects = _ranked(trace, [path for path in program.modules if path and any(is_in(p, path) for p in rounding)])
    # A module whose own operations overflow or underflow must not be replaced by its submodules.
    readings = zip(trace.sites, trace.readings, strict=True)
    to_blame = {
        innermost(site.path, program.modules)
        for site, reading in readings
        if reading.overflow > 0 or reading.lost_fraction > reference.tolerance
    }
    modules: list[str] | None = None
    for repairs in map(_remembering, (emulated, under_rules)):
        # The search on the traced step starts with the modules that repair the emulated one.
        first = modules or []
        ranked = [*first, *(path for path in suspects if path not in first)]
        start = first_enough(ranked, repairs, at_least=len(first) or 1)
        modules = narrow(minimal(start, repairs), suspects, to_blame, repairs) if start else None
    if modules is None:
        return ("",) if under_rules([""]) else None
    return tuple(path for path in program.modules if path in modules)


def innermost(path: str, modules: Sequence[str]) -> str:
    """The innermost of `modules` that contains a path; "" if none does.

    The path may be longer than that of a module, because it may end in other named scopes, such as that of an einsum.
    """
    return max((module for module in modules if is_in(path, module)), key=len, default="")


def minimal(items: Sequence[str], repairs: Repairs) -> list[str]:
    """Reduces `items`, which repair a step, to a subset that still does and of which no item can be left out.

    A binary search finds the shortest prefix of `items` that repairs. The last item of that prefix is needed, so it is
    kept, and the search continues among the items before it. For k needed items of n, this asks about k log2(n) times.
    A predicate that is true for a set and false for a larger one may leave items that are not needed, so each item is
    left out once more at the end, until all are needed. The result is in the order of `items`. A single item is
    returned untried.
    """
    needed: list[str] = []
    rest = list(items)
    while rest and not (needed and repairs(needed)):
        too_short, enough = 0, len(rest)
        while enough - too_short > 1:
            middle = (too_short + enough) // 2
            if repairs([*needed, *rest[:middle]]):
                enough = middle
            else:
                too_short = middle
        needed.append(rest[enough - 1])
        rest = rest[: enough - 1]
    while len(needed) > 1:
        rests = ([other for other in needed if other != item] for item in needed)
        if (fewer := next(filter(repairs, rests), None)) is None:
            break
        needed = fewer
    return [item for item in items if item in needed]


def narrow(modules: list[str], suspects: Sequence[str], to_blame: Collection[str], repairs: Repairs) -> list[str]:
    """Replaces modules by the suspects inside them that contain no other suspect, if the step is still repaired.

    Modules in `to_blame` are kept. After each replacement the set is reduced by `minimal`.

    Args:
      modules: modules that repair the step.
      suspects: all modules that may be at fault.
      to_blame: modules that must not be replaced.
      repairs: the predicate, as in `Repairs`.
    """
    for module in (module for module in modules if module not in to_blame):
        inside = [path for path in suspects if path != module and is_in(path, module)]
        innermost = [path for path in inside if not any(other != path and is_in(other, path) for other in inside)]
        instead = [*(path for path in modules if path != module), *innermost]
        if innermost and repairs(instead):
            return narrow(minimal(instead, repairs), suspects, to_blame, repairs)
    return modules


def _remembering(repairs: Repairs) -> Repairs:
    """Caches the answers of a predicate by set of modules, without regard to their order."""
    tried: dict[frozenset[str], bool] = {}

    def remembered(kept: Sequence[str]) -> bool:
        key = frozenset(kept)
        if key not in tried:
            tried[key] = repairs(kept)
        return tried[key]

    return remembered


def first_enough(suspects: list[str], repairs: Repairs, at_least: int = 1) -> list[str] | None:
    """Tries the first n, 2n, 4n, ... modules of a ranked list, then all.

    Returns the first of these prefixes that repairs the step. n is `at_least`. Returns None if not even all modules
    repair the step, or if there are none.
    """
    count = at_least
    while count < len(suspects):
        if repairs(suspects[:count]):
            return suspects[:count]
        count *= 2
    return suspects if suspects and repairs(suspects) else None


def _ranked(trace: Trace, modules: list[str]) -> list[str]:
    """Sorts modules by decreasing harm: by overflow, then by underflow, then by relative error.

    Each is the largest value among the readings of the module and of its submodules.
    """
    harm = dict.fromkeys(modules, (0.0, 0.0, 0.0))
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        overflow = reading.overflow / reading.size if reading.size else 0.0
        mine = overflow, reading.lost_fraction, reading.relative_error
        for module in (module for module in modules if is_in(site.path, module)):
            worst = harm[module]
            harm[module] = max(worst[0], mine[0]), max(worst[1], mine[1]), max(worst[2], mine[2])
    # On a tie the submodule comes first, because it contains all of the module's harm.
    return sorted(modules, key=lambda module: (harm[module], module.count("/")), reverse=True)


SUSPECTS = 8
"""The largest number of modules that `culprit` tries."""


def at_fault(
    readings: Sequence[tuple[Site, Reading]], program: Program, scale: float, reference: Reference
) -> tuple[Site, Reading] | None:
    """Chooses which of several faulty readings to report.

    It is the first, because the first overflow or underflow causes those after it. With products in float8, small
    values underflow in healthy modules too. It is then the first reading of the module without whose rounding the step
    is right, or the first of all if there is no such module.

    Args:
      readings: readings of possible faults with their sites, in program order.
      program: the step.
      scale: the loss scale.
      reference: the float32 step to compare with.

    Returns:
      A site and its reading; None if `readings` is empty.
    """
    paths = list(dict.fromkeys(site.path for site, _ in readings))
    if len(paths) > 1 and reference.without_float8 is not None:
        left, path = culprit(paths, program, scale, reference)
        if left <= reference.tolerance:
            return next(entry for entry in readings if entry[0].path == path)
    return next(iter(readings), None)


def culprit(paths: Iterable[str], program: Program, scale: float, reference: Reference) -> tuple[float, str]:
    """Finds the first of some modules without whose rounding the step is right, by one emulated run for each module.

    If there is none among the first `SUSPECTS`, it is the module without whose rounding the step is nearest to the
    reference.

    Args:
      paths: module paths, the most suspicious first; at least one.
      program: the step.
      scale: the loss scale.
      reference: the float32 step to compare with.

    Returns:
      How far the step is from the reference without the module's rounding (`Reference.fault`: at most
      `reference.tolerance` means right), and the path of the module.
    """
    tried: list[tuple[float, str]] = []
    for path in list(paths)[:SUSPECTS]:
        tried.append((reference.fault(without_rounding_in(path, program, scale), scale), path))
        if tried[-1][0] <= reference.tolerance:
            return tried[-1]
    return min(tried, key=operator.itemgetter(0))


def without_rounding_in(path: str, program: Program, scale: float) -> list[np.ndarray]:
    """Emulates a step in which one module does not round. Returns the loss and gradients, times the loss scale.

    Submodules of the module do round.
    """
    return outputs_of(Emulator(rounds=lambda other: other != path, reference=False), program, scale)
