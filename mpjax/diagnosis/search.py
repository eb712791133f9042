"""Rules that keep modules in float32: for which paths, in a policy, and as flags of the command line."""

import dataclasses
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mpjax.diagnosis.health import Reference, is_repaired
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.trace import Trace
from mpjax.precision.dtypes import HALF
from mpjax.precision.policy import Policy


def is_in(path: str, module: str) -> bool:
    """Whether a path is that of a module or of one in it; "" is the model."""
    return not module or f"{path}/".startswith(f"{module}/")


def pattern_of(module: str) -> str:
    """The pattern for a module: its path, "?" for what means something in a pattern or a policy's text; "*" for ""."""
    return "".join("?" if character in "*?[=;" else character for character in module) or "*"


def covers(rules: Iterable[str], path: str) -> bool:
    """Whether one of some rules, each the pattern of a module, is for a path."""
    return any(is_in(pattern_of(path), "" if pattern == "*" else pattern) for pattern in rules)


def decides_after(rules: Iterable[str], pattern: str) -> bool:
    """Whether a policy's rule still decides something behind these; one that does not would be an error."""
    return pattern.startswith("type:") or not covers(rules, pattern)


def with_rules(policy: Policy, rules: Mapping[str, str]) -> Policy:
    """The policy with rules that come before its own."""
    kept = {pattern: value for pattern, value in policy.rules.items() if decides_after(rules, pattern)}
    return dataclasses.replace(policy, rules={**rules, **kept})


def flags_of(rules: Mapping[str, str]) -> str:
    """What to add to a command line; empty if there are none."""
    words = [f"{_shell_word(path)} {dtype}" for path, dtype in rules.items()]
    return " ".join(["--precision.rules", *words]) if words else ""


def _shell_word(path: str) -> str:
    return shlex.quote(path) if set(path) & set('"\\$`!') else f'"{path}"'


Repairs = Callable[[Sequence[str]], bool]
"""Whether it repairs the step to keep modules, by path, in float32, with all modules in them."""


def smallest_repair(
    program: Program, trace: Trace, scale: float, reference: Reference, under_rules: Repairs
) -> tuple[str, ...] | None:
    """Modules of which all in float32 repair the step, and no proper subset does; None if there are none.

    Args:
      program: the step.
      trace: what is wrong with it.
      scale: the loss scale.
      reference: what it is held against.
      under_rules: tries modules on the step traced under their rules.

    Returns:
      Module paths in program order; ("",), which is all of the model, where no smaller set does.
    """

    def emulated(kept: Sequence[str]) -> bool:
        return is_repaired(reference, program, scale, lambda path: not any(is_in(path, k) for k in kept))

    rounding = {site.path for site in trace.sites if site.dtype in HALF}
    suspects = _ranked(trace, [path for path in program.modules if path and any(is_in(p, path) for p in rounding)])
    # A module in which something went wrong itself, and not in one that it holds, is not to be left for those.
    readings = zip(trace.sites, trace.readings, strict=True)
    to_blame = {
        site.path for site, reading in readings if reading.overflow > 0 or reading.lost_share > reference.tolerance
    }
    found = None
    for repairs in map(_remembering, (emulated, under_rules)):
        # What the emulator found comes first, and of it alone more may be left out.
        start = found if found and repairs(found) else _first_enough(suspects, repairs)
        found = _inside(minimal(start, repairs), suspects, to_blame, repairs) if start else None
    if found is None:
        return ("",) if under_rules([""]) else None
    return tuple(path for path in program.modules if path in found)


def minimal(items: Sequence[str], repairs: Repairs) -> list[str]:
    """A subset of `items`, which repair, that does too, and of which no item can be left out."""
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        rests = ([item for item in kept if item not in chunk] for chunk in chunks)
        if chunk := next(filter(repairs, chunks), None):
            kept, parts = chunk, 2
        elif rest := next(filter(repairs, rests), None):
            kept, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _inside(found: list[str], suspects: Sequence[str], to_blame: Collection[str], repairs: Repairs) -> list[str]:
    """The same with modules in place of those that hold them, where these do as well; not of those `to_blame`."""
    for module in (module for module in found if module not in to_blame):
        inside = [path for path in suspects if path != module and is_in(path, module)]
        innermost = [path for path in inside if not any(other != path and is_in(other, path) for other in inside)]
        instead = [*(path for path in found if path != module), *innermost]
        if innermost and repairs(instead):
            return _inside(minimal(instead, repairs), suspects, to_blame, repairs)
    return found


def _remembering(repairs: Repairs) -> Repairs:
    tried: dict[frozenset[str], bool] = {}

    def remembered(kept: Sequence[str]) -> bool:
        key = frozenset(kept)
        if key not in tried:
            tried[key] = repairs(kept)
        return tried[key]

    return remembered


def _first_enough(suspects: list[str], repairs: Repairs) -> list[str] | None:
    """The shortest beginning of a ranked list that repairs, by doubling."""
    count = 1
    while count < len(suspects):
        if repairs(suspects[:count]):
            return suspects[:count]
        count *= 2
    return suspects if suspects and repairs(suspects) else None


def _ranked(trace: Trace, modules: list[str]) -> list[str]:
    """Modules by how much went wrong in them: what became inf, what became zero, and how far off they are."""
    harm = dict.fromkeys(modules, (0.0, 0.0, 0.0))
    for site, reading in zip(trace.sites, trace.readings, strict=True):
        overflow = reading.overflow / reading.size if reading.size else 0.0
        mine = overflow, reading.lost_share, reading.relative_error
        for module in (module for module in modules if is_in(site.path, module)):
            worst = harm[module]
            harm[module] = max(worst[0], mine[0]), max(worst[1], mine[1]), max(worst[2], mine[2])
    # Of a module and one in it, where all of its harm is, the one in it.
    return sorted(modules, key=lambda module: (harm[module], module.count("/")), reverse=True)
