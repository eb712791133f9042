"""Rules: which modules a pattern covers, which rule decides each module, and which rules decide nothing."""

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
from mpjax.precision.float8.recipes import Recipe


NORM = "type:norm"
"""The pattern of every normalisation layer."""

LINEAR = "linear_layer"
"""The tag of layers that can multiply in float8.

A tag is a further name of a module, which rules match after `type:` like the names of its classes.
"""

HEAD = "type:head"
"""The pattern of the layer that produces a model's output; `mpjax.precision.heads` finds it."""

ROUTER = "type:Router"
"""The pattern of routers, which choose the experts of each token, and of modules in them; the class has this name."""

STATE_SPACE = "type:StateSpace"
"""The pattern of recurrences, whose decay is an exponential of a long sum; the class has this name."""

FIRST_OR_LAST = "type:first_or_last"
"""The pattern of the first and last layers of a model; `tags_of` in `mpjax.precision.float8.layers` finds them."""

SMALL_PRODUCT = "type:small_product"
"""The pattern of linear layers whose number of inputs or outputs is below 64 or not a multiple of 16."""

TEMPERATURE = "type:Temperature"
"""The pattern of the modules that compare vectors of images and texts, whose few parameters stay in float32."""

DEFAULTS = frozenset({NORM, ROUTER, STATE_SPACE, TEMPERATURE, HEAD, FIRST_OR_LAST, SMALL_PRODUCT})
"""The patterns of rules in presets. Only these may match nothing, because a model need not have these layers."""

NORM_TYPES = frozenset({"BatchNorm", "LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm", "WeightNorm", "SpectralNorm"})

Lineage = tuple[tuple[str, frozenset[str]], ...]
"""A module and its parents, root first: for each, the path and the names of its class, base classes and tags."""


class Rules(Mapping[str, Any]):
    """An immutable, hashable, ordered mapping from pattern to dtype, policy or recipe; the first match decides.

    A pattern is a glob on the module path (`"stem/*"`, `"layers/?/conv1"`; `*` crosses `/`), or `type:` and a glob on
    the name of the class, of a base class or of a tag (`"type:Attention"`, `"type:head"`). Either covers the modules it
    matches and their submodules. `"type:norm"` covers only the normalisation layers themselves. White space around a
    pattern is removed. Two mappings with the same items in another order are not equal.

    Raises:
      UsageError: a pattern is not a string, is empty, is repeated, or contains `=` or `;`.
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
        # Unlike in a dict, order is part of the value, because it decides which rule wins.
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
    """True if `types` (the names of a class and its bases) contain one of `NORM_TYPES`, such as "LayerNorm"."""
    return not NORM_TYPES.isdisjoint(types)


EQUINOX = "eqx.nn."
"""The prefix of the scopes that Equinox names by the class of a layer."""

_MOST_SHOWN = 20


def is_default(pattern: str) -> bool:
    """True for a pattern of `DEFAULTS`, `type:norm` in upper or lower case, the others exactly as written there."""
    return pattern in DEFAULTS or pattern.lower() == NORM


def is_typed(pattern: str) -> bool:
    """True for a pattern on the types of modules, not on paths; `type:norm` in upper or lower case is one."""
    return pattern.startswith("type:") or pattern.lower() == NORM


def covers(pattern: str, lineage: Lineage) -> bool:
    """True if `pattern` matches the last module of `lineage`, or one of the modules that contain it.

    A pattern is a glob on paths, or after `type:` a glob on the names of classes, base classes and tags. Both
    distinguish case. `type:norm`, in any case, looks at the last module alone: it does not cover submodules of a norm.
    """
    if pattern.lower() == NORM:
        return is_norm(lineage[-1][1])
    if pattern.startswith("type:"):
        class_pattern = pattern.removeprefix("type:")
        return any(_matcher(class_pattern)(name) for _, types in lineage for name in types)
    return any(_matcher(pattern)(path) for path, _ in lineage)


@functools.lru_cache(maxsize=32_768)
def _matcher(pattern: str) -> Callable[[str], Any]:
    """Compiles a glob to a function that gives a true value for a text that matches; cached.

    A pattern without a wildcard, as most are in large policies, is compared for equality.
    """
    if any(char in pattern for char in "*?["):
        return re.compile(fnmatch.translate(pattern)).match
    return pattern.__eq__


def winner(rules: Rules, lineage: Lineage) -> str | None:
    """Finds the pattern of the first rule that covers the last module of `lineage`; None if no rule does.

    A rule whose value is a recipe is passed over unless the module is a linear layer (has the tag `LINEAR`) or has no
    known type, as a named scope.
    """
    return next((p for p, value in rules.items() if _is_for(value, lineage[-1][1]) and covers(p, lineage)), None)


def _is_for(value: Any, types: frozenset[str]) -> bool:
    """True unless a rule's value is a recipe and `types` are known and show no linear layer."""
    return not isinstance(value, Recipe) or not types or LINEAR in types


def scope_lineage(scope: str) -> Lineage:
    """Converts a named scope to a lineage without types: the paths from "" (the program) down to the scope itself.

    `a/b` gives the paths "", "a" and "a/b", each with an empty set of types. The names of Equinox classes in the scope
    (`eqx.nn.Linear`) come first, each as a path of its own, so that a rule may name them alone.
    """
    parts = scope.split("/") if scope else []
    classes = [part for part in parts if part.startswith(EQUINOX)]
    paths = ("/".join(parts[:depth]) for depth in range(len(parts) + 1))
    return tuple((path, frozenset()) for path in (*classes, *paths))


def without_class(scope: str) -> str:
    """Removes the last name of a scope, `a/eqx.nn.Linear` to `a`, if Equinox named it by class.

    A scope that consists of this name alone stays unchanged, as does any other scope.
    """
    outer, _, name = scope.rpartition("/")
    return outer if outer and name.startswith(EQUINOX) else scope


def by_path(rules: Rules, lineages: Iterable[Lineage]) -> Rules:
    """Replaces the `type:` patterns of rules by module paths, because named scopes have no type.

    Each `type:` pattern becomes the paths of the modules that it decides, without submodules of a module that it also
    decides. Paths are escaped for globs; the path of the model itself becomes `*`. A `type:` pattern that decides no
    module is dropped. Of equal patterns, the first keeps its value.

    Args:
      rules: the rules.
      lineages: the lineage of each module of a model.
    """
    decided = {lineage: winner(rules, lineage) for lineage in lineages}
    paths: dict[str, Any] = {}
    for pattern, value in rules.items():
        if is_typed(pattern):
            for lineage, decisive in decided.items():
                # A path covers all submodules, so only the outermost path is needed.
                if decisive == pattern != decided.get(lineage[:-1]):
                    paths.setdefault(glob.escape(lineage[-1][0]) or "*", value)
        else:
            paths.setdefault(pattern, value)
    return Rules(paths)


def decide(
    rules: Rules, lineages: Iterable[Lineage], second_names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str | None]:
    """Finds the pattern that decides each module, by module path; None where no rule does.

    Also checks that every rule decides a module.

    Args:
      rules: the rules of the policy.
      lineages: the lineage of each module, under its first path.
      second_names: the further paths of shared modules, each mapped to the first path of its module.

    Raises:
      UsageError: a rule, other than of `DEFAULTS`, matches nothing, or only modules that earlier rules decide. The
        message explains up to 20 of these rules, with the nearest paths or types.
    """
    lineages = tuple(lineages)
    winners = [winner(rules, lineage) for lineage in lineages]
    decided = {lineage[-1][0]: pattern for lineage, pattern in zip(lineages, winners, strict=True)}
    deciding = set(winners)  # of several models, modules may have the same path
    idle = [p for p in rules if p not in deciding and not is_default(p)]
    if idle:
        reasons = [_why_idle(pattern, rules, lineages, second_names) for pattern in idle[:_MOST_SHOWN]]
        more = [f"and {len(idle) - _MOST_SHOWN} more rules"] if idle[_MOST_SHOWN:] else []
        raise UsageError("\n".join(reasons + more))
    return decided


def _why_idle(pattern: str, rules: Rules, lineages: tuple[Lineage, ...], second_names: Mapping[str, str]) -> str:
    matched = [lineage for lineage in lineages if covers(pattern, lineage)]
    meant = [lineage for lineage in matched if _is_for(rules[pattern], lineage[-1][1])]
    if matched and not meant:
        return f"rule '{pattern}' decides nothing: {rules[pattern]} is for linear layers, and it matches none"
    if matched:
        first = winner(rules, meant[0])
        return f"rule '{pattern}' decides nothing: rules before it ('{first}') decide all its modules; put it first"
    for second, first in second_names.items():
        if covers(pattern, scope_lineage(second)):
            same = f"'{second}' is the module '{first}', which has one dtype"
            return f"rule '{pattern}' matches nothing: {same}; write '{first}'"
    if pattern.startswith("type:"):
        known = sorted({f"type:{name}" for lineage in lineages for _, types in lineage for name in types})
    else:
        known = sorted({path for lineage in lineages for path, _ in lineage if path})
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
    hint = f"nearest: {', '.join(near)}" if near else "the model has no submodules"
    return f"rule '{pattern}' matches nothing; {hint}"
