"""The parameters and statistics that a pattern covers: arrays by path, or all arrays of matching modules."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.scan import one_by_one
from mpjax.precision.calls import modules_of
from mpjax.precision.module_tree import lineages_of
from mpjax.precision.rules import Lineage, covers, is_typed, scope_lineage
from mpjax.training.state import take_apart


@dataclasses.dataclass(frozen=True)
class ArrayPaths:
    """The paths of a model's arrays and modules. Each block of a stack has its own paths, as in `blocks/3/mlp`.

    Attributes:
      params: paths of parameters.
      stats: paths of statistics.
      lineages: each module with its parents, by path.
    """

    params: tuple[str, ...]
    stats: tuple[str, ...]
    lineages: Mapping[str, Lineage]

    @classmethod
    def of(cls, model: Any) -> "ArrayPaths":
        """Collects the paths of a model, which may be abstract; stacked blocks get the paths of single blocks."""
        single = one_by_one(model)
        _, params, stats = take_apart(single)
        return cls(
            tuple(params), tuple(stats), {lineage[-1][0]: lineage for lineage in lineages_of(modules_of(single))}
        )

    def decided(self, patterns: Iterable[str], paths: Iterable[str], flag: str) -> dict[str, str]:
        """Maps each path to the first pattern that matches it; paths that no pattern matches are left out.

        Args:
          patterns: a glob on the path of an array or of a module around it, or `type:` and a glob on a module's class.
          paths: the paths to match.
          flag: the name of the setting with the patterns, for messages.

        Raises:
          UsageError: a pattern matches nothing, or only paths that earlier patterns decide. The message names the
            nearest paths.
        """
        patterns, paths = tuple(patterns), tuple(paths)
        by_path = {path: [pattern for pattern in patterns if self.covers(pattern, path)] for path in paths}
        pattern_of = {path: matching[0] for path, matching in by_path.items() if matching}
        for pattern in patterns:
            if pattern in pattern_of.values():
                continue
            before = next((matching[0] for matching in by_path.values() if pattern in matching), None)
            if before:
                raise UsageError(f"{flag} '{pattern}' decides nothing: '{before}' before it decides all; put it first")
            known = sorted({path for path in self.lineages if path} | set(paths))
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
            raise UsageError(f"{flag} '{pattern}' matches nothing; nearest: {', '.join(near)}")
        return pattern_of

    def covers(self, pattern: str, path: str) -> bool:
        """True if a pattern matches the array at `path`, or a module around it; patterns are as for `decided`.

        A `type:` pattern is compared with the innermost module that holds the array, and with its parents.
        """
        return covers(pattern, self._owner(path) if is_typed(pattern) else scope_lineage(path))

    def _owner(self, path: str) -> Lineage:
        """Finds the innermost module that holds the array at `path`, and returns its lineage: it and its parents."""
        parts = path.split("/")
        prefixes = ("/".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1))
        return next(self.lineages[prefix] for prefix in prefixes if prefix in self.lineages)
