"""Reports the dtypes that a compiled program runs in, against the dtypes asked for, as a table or as JSON."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mpjax import notebook, strict_json
from mpjax.errors import DtypeError
from mpjax.plan.dtype_order import AS_ASKED, MISSING, NARROWER, UNKNOWN, WIDER, compared, narrowest
from mpjax.plan.verdicts import NOT_TRACED, PRODUCTS, RECIPE, ReceiptRow, counted


_INDEX = re.compile(r"(?<![^/])\d+(?![^/])")
_COLUMNS = ("module", "pass", "work", "asked", "runs in", "sums in", "result", "by", "count", "verdict")
_OTHERS = {"reduction": "sums over devices", "accumulation": "sums of many terms", "update": "updates"}
_MEANING = {WIDER: " (lost speed)", NARROWER: " (lost accuracy)", MISSING: "", UNKNOWN: ""}


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The result of `receipt`. Prints as a table, iterates over `rows`, and is true if everything runs as asked.

    Attributes:
      device: the device that the program was compiled for.
      policy: the policy that the program was compared with, as text; None without a policy.
      rows: the dtypes that run, by module, pass and kind.
      update_bytes: the bytes that kernels move from the gradients to the new parameters and optimizer state; 0 if no
        parameter is updated.
      notes: the parts that could not be checked, as text; these are no faults.
    """

    device: str
    policy: str | None
    rows: tuple[ReceiptRow, ...]
    update_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[ReceiptRow]:
        return iter(self.rows)

    def __bool__(self) -> bool:
        return all(row.verdict == AS_ASKED for row in self.rows)

    @property
    def faults(self) -> list[str]:
        """One line for each row that is not as asked.

        Rows of blocks that differ only by index share a line. So do rows that no program for the device could run as
        asked.
        """
        limits: dict[str, int] = collections.defaultdict(int)
        for row in self.rows:
            if row.device_limit:
                limits[f"{row.verdict}{_MEANING[row.verdict]}: {row.reason}"] += row.count
        return [
            *(_fault(row) for row in _merged(self.rows) if row.verdict != AS_ASKED and not row.device_limit),
            *(f"{count} products {text}" for text, count in limits.items()),
        ]

    @property
    def line(self) -> str:
        """The receipt in one line: "float16 as asked in 62 of 62 products"."""
        return "; ".join([*self._products(), *self._others()]) or "no products"

    def require(self, *, device_limits: bool = True) -> None:
        """Raises DtypeError with a line for each row that is not as asked.

        Args:
          device_limits: False to ignore rows that no program for the device could run as asked, such as half precision
            on a CPU.
        """
        __tracebackhide__ = True
        rows = [row for row in self.rows if device_limits or not row.device_limit]
        faults = Receipt(self.device, self.policy, tuple(rows)).faults
        if faults:
            raise DtypeError("\n  ".join([f"{self.device} does not run what was asked for: {self.line}", *faults]))

    def as_json(self) -> dict[str, Any]:
        """Converts the receipt to a dict for JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {**dataclasses.asdict(self), "line": self.line, "rows": rows, "faults": self.faults}

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """Formats the receipt as JSON text, and writes it to `file` if given."""
        text = strict_json.encode(self.as_json(), indent=2)
        if file is not None:
            pathlib.Path(file).write_text(text + "\n")
        return text

    def _products(self) -> list[str]:
        asked: dict[str, list[ReceiptRow]] = collections.defaultdict(list)
        more = sum(row.count for row in self.rows if row.reason == NOT_TRACED)
        for row in self.rows:
            if row.kind in PRODUCTS and row.reason != NOT_TRACED:
                asked[row.asked or "an unknown dtype"].append(row)
        phrases = [_phrase(dtype, rows, self.device) for dtype, rows in asked.items()]
        return [*phrases, *([f"{more} more products that the function does not ask for"] if more else [])]

    def _others(self) -> list[str]:
        """Phrases for each verdict other than as asked on sums, updates and recipes."""
        phrases = []
        for kind, plural in _OTHERS.items():
            own = [row for row in self.rows if row.kind == kind]
            total = sum(row.count for row in own)
            counts: collections.Counter = collections.Counter()
            for row in own:
                counts[row.verdict] += row.count
            phrases += [f"{count} of {total} {plural} {name}" for name, count in counts.items() if name != AS_ASKED]
        asked = [row for row in self.rows if row.kind == RECIPE]
        return [*phrases, *(f"float8 asked, {row.verdict} in all products" for row in asked)]

    def __rich__(self):
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name == "count" else "left", overflow="fold")
        for row in _merged(self.rows):
            table.add_row(*map(escape, _cells(row)))
        return table

    def _repr_html_(self) -> str:
        return notebook.block(
            notebook.heading(self._title()),
            notebook.table(_COLUMNS, map(_cells, _merged(self.rows))),
            notebook.paragraphs([*self.faults, *self.notes]),
        )

    def _title(self) -> str:
        asked = f", asked: {self.policy}" if self.policy else ""
        return f"{self.device}{asked}: {self.line}"

    def __str__(self) -> str:
        from rich.console import Console

        longest = max((len(row.path) for row in self.rows), default=0)
        console = Console(width=max(160, 2 * longest + 120), color_system=None)
        with console.capture() as captured:
            console.print(self)
        lines = [self._title(), *(line.rstrip() for line in captured.get().splitlines())]
        if self.update_bytes:
            lines.append(f"the update moves {self.update_bytes / 1e6:,.1f} MB")
        below = [*self.faults, *self.notes]
        return "\n".join([*lines, *(["", *below] if below else [])])


def _phrase(asked: str, rows: list[ReceiptRow], device: str) -> str:
    """Summarizes the products for which one dtype was asked."""
    total = sum(row.count for row in rows)
    good = sum(row.count for row in rows if row.verdict == AS_ASKED)
    if good == total:
        return f"{asked} as asked in {total} of {total} products"
    bad: dict[tuple[str, str], int] = collections.defaultdict(int)
    for row in rows:
        if row.verdict != AS_ASKED:
            bad["" if _is_early(row) else row.operands, row.verdict] += row.count
    parts = [_became(operands, verdict, count, total, device) for (operands, verdict), count in bad.items()]
    return f"{asked} asked; {', '.join(parts)}"


def _became(operands: str, verdict: str, count: int, total: int, device: str) -> str:
    if verdict in (MISSING, UNKNOWN) or not operands:
        return f"{count} of {total} products {verdict}"
    return f"{device} computes {count} of {total} products in {operands} ({verdict})"


def _is_early(row: ReceiptRow) -> bool:
    """True if a product is narrower although it runs in no fewer bits than asked: the function itself rounds."""
    if row.verdict != NARROWER or not row.operands or not row.asked:
        return False
    return compared(*([narrowest(text.split(" x "))] for text in (row.asked, row.operands))) != NARROWER


def _merged(rows: tuple[ReceiptRow, ...]) -> list[ReceiptRow]:
    """Merges rows that differ only in an index of their path, with `*` for the index.

    All updates that are as asked become one row.
    """

    def star(row: ReceiptRow) -> ReceiptRow:
        path = "*" if row.kind == "update" and row.verdict == AS_ASKED else _INDEX.sub("*", row.path)
        return dataclasses.replace(row, path=path, note=_INDEX.sub("*", row.note))

    starred = [star(row) for row in rows]
    counts: dict[tuple, int] = collections.Counter(
        (row.path, row.direction, row.kind, row.verdict, row.operands) for row in starred
    )
    return counted(
        [
            short if counts[short.path, short.direction, short.kind, short.verdict, short.operands] > 1 else row
            for short, row in zip(starred, rows, strict=True)
        ]
    )


def _cells(row: ReceiptRow) -> tuple[str, ...]:
    return (
        row.path or "(outside modules)",
        row.direction,
        row.kind,
        row.asked or "?",
        row.operands or "-",
        row.accumulation or "?" if row.operands else "-",
        row.result or "-",
        row.by or "-",
        str(row.count),
        f"{row.verdict}, {row.note}" if row.note else row.verdict,
    )


def _fault(row: ReceiptRow) -> str:
    where = row.path or "(outside modules)"
    runs = f"runs in {row.operands}, " if row.operands else ""
    asked = f"asked in {row.asked}, " if row.asked else ""
    times = f" ({row.count})" if row.count > 1 else ""
    reason = f": {row.reason}" if row.reason else ""
    return f"{where}, {row.direction} {row.kind}{times}: {asked}{runs}{row.verdict}{_MEANING[row.verdict]}{reason}"
