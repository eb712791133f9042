"""Rules: which modules a pattern covers, which rule decides each module, and which rule decides none."""

import collections
import difflib
import fnmatch
import functools
import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpjax.errors import UsageError


NORM = "type:norm"
"""The pattern of every normalisation layer, and the only rule that may match nothing: not every model has one."""

NORM_TYPES = frozenset({"BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm", "WeightNorm", "SpectralNorm"})

Lineage = tuple[tuple[str, frozenset[str]], ...]
"""A module and its parents, root first: the path and the names of the classes it inherits from, of each."""


class Rules(Mapping[str, Any]):
    """A frozen, hashable mapping from pattern to dtype or policy. Order counts: the first match wins.

    A pattern is a glob on the module path (`"stem/*"`, `"layers/?/conv1"`; `*` crosses `/`), or `type:` and a glob on
    the class name, bases included (`"type:Attention"`). Either covers the modules it matches and all that they hold.
    `"type:norm"` covers the normalisation layers themselves.
    """

    def __init__(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        items = rules.items() if isinstance(rules, Mapping) else rules
        pairs = tuple((_checked(pattern), value) for pattern, value in items)
        counts = collections.Counter(pattern for pattern, _ in pairs)
        if repeated := {pattern for pattern, count in counts.items() if count > 1}:
            raise UsageError(f"rule given twice: {', '.join(sorted(repeated))}")
        self._rules = dict(pairs)

    def __getitem__(self, pattern: str):
        return self._rules[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other) -> bool:
        # Unlike a dict: order decides which rule wins, so order is part of the value.
        return isinstance(other, Mapping) and tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr({pattern: str(value) for pattern, value in self.items()})


def _checked(pattern: Any) -> str:
    if not isinstance(pattern, str) or not pattern.strip() or set(pattern) & set("=;"):
        raise UsageError(f"bad rule pattern {pattern!r}: wanted a module path, a glob or 'type:Class'")
    return pattern.strip()


def is_norm(types: Iterable[str]) -> bool:
    """Whether class names (a class and its bases) are those of a normalisation layer."""
    return not NORM_TYPES.isdisjoint(types)


EQUINOX = "eqx.nn."
"""What the scopes begin with that Equinox names by the class of a layer."""

_MOST_SHOWN = 20


def covers(pattern: str, lineage: Lineage) -> bool:
    """Whether `pattern` matches the module at the end of `lineage`, or one that holds it."""
    if pattern.lower() == NORM:
        return is_norm(lineage[-1][1])
    if pattern.startswith("type:"):
        wanted = pattern.removeprefix("type:")
        return any(_matcher(wanted)(name) for _, types in lineage for name in types)
    return any(_matcher(pattern)(path) for path, _ in lineage)


@functools.lru_cache(maxsize=32_768)
def _matcher(pattern: str) -> Callable[[str], Any]:
    """What says whether a text matches a glob: most patterns of large policies are none, and are compared."""
    if any(char in pattern for char in "*?["):
        return re.compile(fnmatch.translate(pattern)).match
    return pattern.__eq__


def winner(rules: Rules, lineage: Lineage) -> str | None:
    """The pattern that decides the module at the end of `lineage`; None if no rule does."""
    return next((pattern for pattern in rules if covers(pattern, lineage)), None)


def scope_lineage(scope: str) -> Lineage:
    """A named scope and those around it, as modules of no known type; Equinox's own by the name of the class too."""
    parts = scope.split("/") if scope else []
    classes = [part for part in parts if part.startswith(EQUINOX)]
    paths = ("/".join(parts[:depth]) for depth in range(len(parts) + 1))
    return tuple((path, frozenset()) for path in (*classes, *paths))


def without_class(scope: str) -> str:
    """Returns a scope without the one in it that is named by a class, where it has a path itself: an Equinox layer."""
    outer, _, name = scope.rpartition("/")
    return outer if outer and name.startswith(EQUINOX) else scope


def by_path(rules: Rules, lineages: Iterable[Lineage]) -> Rules:
    """The same rules for named scopes, which have no type: each `type:` pattern as the paths of what it decides."""
    decided = {lineage: winner(rules, lineage) for lineage in lineages}
    paths: dict[str, Any] = {}
    for pattern, value in rules.items():
        if pattern.startswith("type:"):
            for lineage, decisive in decided.items():
                # A path covers all that the module holds, so that the outermost will do.
                if decisive == pattern != decided.get(lineage[:-1]):
                    paths.setdefault(glob.escape(lineage[-1][0]) or "*", value)
        else:
            paths.setdefault(pattern, value)
    return Rules(paths)


def decide(
    rules: Rules, lineages: Iterable[Lineage], second_names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str | None]:
    """The pattern that decides each module, by module path; None where no rule does.

    Args:
      rules: of the policy.
      lineages: of each module under its first name.
      second_names: further paths of modules that stand in several places, to their first.

    Raises:
      UsageError: a rule matches nothing, or only modules that earlier rules decide. All such rules are named, each
        with the nearest paths or types.
    """
    lineages = tuple(lineages)
    decided = {lineage[-1][0]: winner(rules, lineage) for lineage in lineages}
    deciding = set(decided.values())
    idle = [p for p in rules if p not in deciding and p.lower() != NORM]
    if idle:
        reasons = [_why_idle(pattern, rules, lineages, second_names) for pattern in idle[:_MOST_SHOWN]]
        more = [f"and {len(idle) - _MOST_SHOWN} more rules"] if idle[_MOST_SHOWN:] else []
        raise UsageError("\n".join(reasons + more))
    return decided


def _why_idle(pattern: str, rules: Rules, lineages: tuple[Lineage, ...], second_names: Mapping[str, str]) -> str:
    matched = [lineage for lineage in lineages if covers(pattern, lineage)]
    if matched:
        first = winner(rules, matched[0])
        return f"rule '{pattern}' decides nothing: all it matches is decided by '{first}' before it; put it first"
    for second, first in second_names.items():
        if covers(pattern, scope_lineage(second)):
            same = f"'{second}' is the module '{first}', which has one dtype"
            return f"rule '{pattern}' matches nothing: {same}; write '{first}'"
    if pattern.startswith("type:"):
        known = sorted({f"type:{name}" for lineage in lineages for _, types in lineage for name in types})
    else:
        known = sorted({path for lineage in lineages for path, _ in lineage if path})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
    return f"rule '{pattern}' matches nothing; nearest: {', '.join(near) or 'the model has no submodules'}"
