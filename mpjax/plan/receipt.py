"""Compares the dtypes that a compiled program runs in with the dtypes asked for, and prints the result (a receipt)."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from mpjax import notebook, strict_json
from mpjax.errors import DtypeError
from mpjax.plan.compiled_products import Target, compiled_products_of, loops_of
from mpjax.plan.hlo import parse
from mpjax.plan.kernels import update_bytes
from mpjax.plan.pairing import paired
from mpjax.plan.parameter_updates import (
    other_argument,
    parameters_of,
    returned_of,
    rounded_of,
    rows_of_updates,
    updated_of,
    updates_of,
)
from mpjax.plan.product_verdicts import paths_of, rows_of_products, rows_of_recipe
from mpjax.plan.program_sums import rows_of_accumulations, rows_of_casts, rows_of_sums, sums_of
from mpjax.plan.traced_products import UNTRACED, traced_program
from mpjax.plan.verdicts import (
    AS_ASKED,
    MISSING,
    NARROWER,
    NOT_TRACED,
    PRODUCTS,
    RECIPE,
    UNKNOWN,
    WIDER,
    ReceiptRow,
    compared,
    counted,
    narrowest,
)
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import HALF
from mpjax.precision.policy import Policy
from mpjax.precision.product_dtypes import PolicyForModules


_DERIVATIVE = "jvp("
"""Part of the names of all operations of a differentiated function."""

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_INDEX = re.compile(r"(?<![^/])\d+(?![^/])")
_COLUMNS = ("module", "pass", "work", "asked", "runs in", "sums in", "result", "by", "count", "verdict")
_OTHERS = {"reduction": "sums over devices", "accumulation": "sums of many terms", "update": "updates"}
_MEANING = {WIDER: " (lost speed)", NARROWER: " (lost accuracy)", MISSING: "", UNKNOWN: ""}


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The result of `receipt`. Prints as a table, iterates over `rows`, and is true if all rows are as asked.

    A row with the verdict "unknown" makes it false; a receipt without rows is true.

    Attributes:
      device: the device that the program was compiled for.
      policy: the policy that the program was compared with, as text; None without a policy.
      rows: the dtypes that run, by module, pass and kind.
      update_bytes: the bytes that kernels read and write to compute the new parameters and optimizer state from the
        gradients; 0 if no parameter is updated, or if its arithmetic could not be read.
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
        """One line for each row that is not as asked; empty if all are.

        Equal rows of blocks share a line, with `*` for the index. Products that no program for the device could run as
        asked are counted in one line for each verdict and reason, without a path.
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
        """The receipt in one line: "float16 as asked in 62 of 62 products"; "no products" if there is nothing to say.

        It has a phrase for the products of each dtype asked for, and one for products that are not in the traced
        function; then one with counts for each kind of sums, and for updates, and each verdict except "as asked"; then
        one for a recipe without products.
        """
        return "; ".join([*self._products(), *self._others()]) or "no products"

    def require(self, *, device_limits: bool = True) -> None:
        """Raises DtypeError with `line` and the lines of `faults`, if there are any.

        A row with the verdict "unknown" is a fault too.

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
        """Converts the receipt to a dict for JSON: its fields, `line` and `faults`. Each row is a dict too."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {**dataclasses.asdict(self), "line": self.line, "rows": rows, "faults": self.faults}

    def to_json(self, file: str | pathlib.Path | None = None) -> str:
        """Formats the receipt as indented JSON text (`as_json`), and writes it to `file` if given, replacing it."""
        return strict_json.export(self.as_json(), file)

    def _products(self) -> list[str]:
        by_dtype: dict[str, list[ReceiptRow]] = collections.defaultdict(list)
        more = sum(row.count for row in self.rows if row.reason == NOT_TRACED)
        for row in self.rows:
            if row.kind in PRODUCTS and row.reason != NOT_TRACED:
                by_dtype[row.asked or "an unknown dtype"].append(row)
        phrases = [_phrase(dtype, rows, self.device) for dtype, rows in by_dtype.items()]
        return [*phrases, *([f"{more} more products that the function does not ask for"] if more else [])]

    def _others(self) -> list[str]:
        """Lists phrases such as "2 of 5 updates wider", for each kind of work but products, and each verdict.

        The verdict "as asked" has none. A phrase for the row of a recipe comes last.
        """
        phrases = []
        for kind, plural in _OTHERS.items():
            rows = [row for row in self.rows if row.kind == kind]
            total = sum(row.count for row in rows)
            counts: collections.Counter = collections.Counter()
            for row in rows:
                counts[row.verdict] += row.count
            phrases += [f"{count} of {total} {plural} {name}" for name, count in counts.items() if name != AS_ASKED]
        recipes = [row for row in self.rows if row.kind == RECIPE]
        return [*phrases, *(f"float8 asked, {row.verdict} in all products" for row in recipes)]

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
        policy = f", asked: {self.policy}" if self.policy else ""
        return f"{self.device}{policy}: {self.line}"

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


def _phrase(requested: str, rows: list[ReceiptRow], device: str) -> str:
    """Summarizes the products for which one dtype was asked: "float16 as asked in 62 of 62 products", or the faults."""
    total = sum(row.count for row in rows)
    good = sum(row.count for row in rows if row.verdict == AS_ASKED)
    if good == total:
        return f"{requested} as asked in {total} of {total} products"
    bad: dict[tuple[str, str], int] = collections.defaultdict(int)
    for row in rows:
        if row.verdict != AS_ASKED:
            bad["" if _is_early(row) else row.operands, row.verdict] += row.count
    phrases = [_became(operands, verdict, count, total, device) for (operands, verdict), count in bad.items()]
    return f"{requested} asked; {', '.join(phrases)}"


def _became(operands: str, verdict: str, count: int, total: int, device: str) -> str:
    if verdict in (MISSING, UNKNOWN) or not operands:
        return f"{count} of {total} products {verdict}"
    return f"{device} computes {count} of {total} products in {operands} ({verdict})"


def _is_early(row: ReceiptRow) -> bool:
    """True if a row is "narrower" although its operands are not: the product loses bits before or after."""
    if row.verdict != NARROWER or not row.operands or not row.asked:
        return False
    return compared(*([narrowest(text.split(" x "))] for text in (row.asked, row.operands))) != NARROWER


def _merged(rows: tuple[ReceiptRow, ...]) -> list[ReceiptRow]:
    """Merges rows that differ only in an index of their path: the index becomes `*`, and counts are added.

    A row that no other row equals keeps its path. All updates that are as asked and of the same dtypes become one row.
    """

    def star(row: ReceiptRow) -> ReceiptRow:
        path = "*" if row.kind == "update" and row.verdict == AS_ASKED else _INDEX.sub("*", row.path)
        return dataclasses.replace(row, path=path, note=_INDEX.sub("*", row.note))

    def alike(row: ReceiptRow) -> ReceiptRow:
        return dataclasses.replace(row, count=1)

    starred = [star(row) for row in rows]
    counts = collections.Counter(map(alike, starred))
    return counted([short if counts[alike(short)] > 1 else row for short, row in zip(starred, rows, strict=True)])


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
    requested = f"asked in {row.asked}, " if row.asked else ""
    times = f" ({row.count})" if row.count > 1 else ""
    reason = f": {row.reason}" if row.reason else ""
    return f"{where}, {row.direction} {row.kind}{times}: {requested}{runs}{row.verdict}{_MEANING[row.verdict]}{reason}"


def receipt_of(
    executable: Any,
    jaxpr: Any,
    policy: Policy | None,
    *,
    target: Target | None = None,
    text: str = "",
    modules: Mapping[Any, Any] = MappingProxyType({}),
    params: int = 0,
    updates: str = "",
) -> Receipt:
    """Compares the dtypes that a compiled program runs in with the dtypes that its trace and a policy ask for.

    Args:
      executable: the `jax.stages.Compiled`.
      jaxpr: the traced program; None if unknown.
      policy: the policy; None to compare with the traced program alone.
      target: the device that the program was compiled for; None to ask the executable.
      text: the text of the program; empty to ask the executable.
      modules: NNX modules whose classes the policy's rules may name, by any key.
      params: the index among the arguments of the parameters, or of a training state that has `params`. If there is no
        such argument, no update is compared.
      updates: the narrowest dtype allowed for updates of parameters: float32 with master weights. Empty for the
        policy's dtype of parameters or, without a policy, each parameter's own dtype.

    Raises:
      UsageError: a rule of the policy decides nothing: no module and no named scope has its name.
    """
    text, target = text or executable.as_text(), target or _target_of(executable)
    program, divided = parse(text), _PARTITIONS.search(text[: text.find("\n")])
    traced = jaxpr is not None
    requested = traced_program(jaxpr) if traced else UNTRACED
    runs, partitions = compiled_products_of(program, target), int(divided[1]) if divided else 1
    pairs = paired(requested.products, runs, lambda: loops_of(program), partitions=partitions)
    module_policy = PolicyForModules(policy, modules)
    module_policy.require_rules({scope for scope, _ in equations(jaxpr)} if traced else None)
    rounds = {str(dtype) for dtype in module_policy.dtypes}
    products = rows_of_products(pairs, module_policy, target, traced=traced, rounds=rounds)

    arguments, results = executable.args_info[0], executable.out_info
    least = updates or (str(policy.param_dtype) if policy else "")
    # An array that is both argument and result need not be a parameter, unless something is differentiated.
    differentiated = any(product.differentiated for product in requested.products) if traced else _DERIVATIVE in text
    parameters = {}
    if params < len(arguments):
        parameters = parameters_of(arguments[params], results, least, narrower=traced and differentiated)
    updated = updated_of(parameters, requested, differentiated=differentiated)
    dtypes = updates_of(program, [parameter.output for parameter in updated.values()])
    state = {number for argument in arguments for _, number in returned_of(argument, results).values()}
    rows = [
        *products,
        *rows_of_recipe(module_policy.awaited(paths_of(pairs)) if policy else None, products, target, traced=traced),
        *rows_of_sums(
            requested.sums,
            sums_of(program),
            least=str(policy.reduce_dtype) if policy else None,
            parameters=[parameter.dims for parameter in parameters.values()],
        ),
        *(rows_of_accumulations(program) if policy is not None and policy.reduce_dtype not in HALF else ()),
        *rows_of_casts(requested.sums, requested.cast, rounds),
        *rows_of_updates(
            {
                path: (parameter.least, update_dtypes)
                for (path, parameter), update_dtypes in zip(updated.items(), dtypes, strict=True)
            },
            rounded_of(updated, requested),
        ),
    ]
    notes = []
    if traced and differentiated and not any(dtypes) and not any(requested.gradients):
        known = "no array of a model comes" if modules else f"argument {params} has no array that comes"
        other = other_argument(params, arguments, results, requested)
        notes.append(f"no update was looked at: {known} back changed{other}")
    return Receipt(
        target.name,
        None if policy is None else str(policy),
        tuple(rows),
        update_bytes(program, sorted(state)) if any(dtypes) else 0,
        tuple(notes),
    )


def _target_of(executable: Any) -> Target:
    """Describes the device of an executable; JAX's first device if its inputs and outputs have no shardings."""
    shardings = jax.tree.leaves((executable.output_shardings, executable.input_shardings))
    device = next(iter(shardings[0].device_set)) if shardings else jax.devices()[0]
    if device.platform == "cpu":
        return Target("this CPU", "cpu")
    try:
        rounds = device.platform == "gpu" and float(device.compute_capability) >= 8.0
    except (AttributeError, ValueError):  # on AMD, the capability is a name, "gfx942"
        rounds = False
    return Target(str(device.device_kind), str(device.platform), rounds)
