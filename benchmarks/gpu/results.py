"""The file of results: complete after every row, so that a run that is cut off loses nothing."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from gpu.cases import Case, Peer, Row
from gpu.conclusions import conclusions


class Results:
    """What was measured so far.

    Attributes:
      header: machine, versions, ceilings.
      cases: records by the cases' names.

    Args:
      path: of the file; None: kept in memory alone.
      say: is told each new record in a line.
    """

    def __init__(self, path: pathlib.Path | None, say: Callable[[str], None] = lambda line: None):
        self.path, self.say = path, say
        self.header: dict[str, Any] = {"finished": False}
        self.cases: dict[str, dict[str, Any]] = {}
        self.described: dict[str, Case] = {}

    def open(self, case: Case) -> None:
        """Begins a case."""
        self.described[case.name] = case
        self.cases[case.name] = {"title": str(case), **dataclasses.asdict(case), "unit": case.unit, "rows": {}}

    def reference(self, case: Case, peer: Peer, found: dict[str, Any]) -> None:
        """Records a peer's first step in float32, and writes."""
        self.cases[case.name].setdefault("references", {})[peer] = found
        self.write()
        self.say(f"{case.name} {peer} reference: {_short(found)}")

    def record(self, case: Case, row: Row, **found: Any) -> None:
        """Adds to a row, and writes."""
        self._row(case, row).update(found)
        self.write()
        if "seconds" not in found:
            said = {**{name: value for name, value in found.items() if name != "facts"}, **found.get("facts", {})}
            said.pop("calls", None)  # a dozen names
            self.say(f"{case.name} {row}: {_short(said)}")

    def fail(self, case: Case, row: Row, error: str) -> None:
        """Records what went wrong with a row, which then has no speed, and writes."""
        self._row(case, row)["error"] = error
        self.write()
        self.say(f"{case.name} {row}: {error}")

    def write(self) -> None:
        """Replaces the file as a whole."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")
        half.write_text(json.dumps(self.concluded(), indent=2) + "\n")
        half.replace(self.path)

    def concluded(self) -> dict[str, Any]:
        """Header and records, with what follows from them."""
        ceilings = self.header.get("ceilings", {})
        cases = {name: conclusions(self.described[name], record, ceilings) for name, record in self.cases.items()}
        return {**self.header, "cases": cases}

    def _row(self, case: Case, row: Row) -> dict[str, Any]:
        return self.cases[case.name]["rows"].setdefault(str(row), dataclasses.asdict(row))


def _short(found: dict[str, Any]) -> str:
    def value(item: Any) -> str:
        if isinstance(item, dict):
            return f"({_short(item)})"
        return f"{item:.4g}" if isinstance(item, float) else str(item)

    return ", ".join(f"{name} {value(item)}" for name, item in found.items())
