"""Compares the sums, casts and updates of a compiled program with the dtypes asked for, one row each.

`product_verdicts.py` builds the rows of products.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from mpjax.plan.dtype_order import AS_ASKED, MISSING, NARROWER, UNKNOWN, compared, narrowest
from mpjax.plan.hlo import Computation, HloProgram, Instruction, module_of, shapes_of
from mpjax.plan.pairing import UNCLEAR
from mpjax.plan.runs import dtype_of
from mpjax.plan.sums_and_updates import Sum
from mpjax.precision.casting.gradient_sums import MANY
from mpjax.precision.dtypes import HALF


PRODUCTS = ("product", "convolution", "attention", "kernel")
"""The kinds of rows that count as products."""

NOT_TRACED = "no such product is in the traced function"
RECIPE = "recipe"
"""The kind of the row of a recipe that no product runs in."""


@dataclasses.dataclass(frozen=True)
class ReceiptRow:
    """The dtypes of several products of one module, pass and kind, or of sums over devices, or of updates.

    Attributes:
      path: the module path; empty outside of modules.
      direction: "forward", "backward", "update", or "other" for computations that are not differentiated.
      kind: "product", "convolution", "attention", "kernel" (of Pallas, with products inside), "reduction" (a sum over
        devices), "accumulation" (a sum of many terms on one device, if it is in half precision), "update" (of a
        parameter), or "recipe" (of a policy, if no product runs in it).
      asked: the dtype asked for, or the dtypes of both operands; empty if unknown.
      operands: the dtype in which the program multiplies or adds, or the dtypes of both operands; empty if nothing
        runs.
      accumulation: the dtype of the sums; empty if unknown.
      result: the dtype of the result.
      by: the library or kernel that computes it.
      count: the number of products, sums or updates. The body of a loop counts once.
      verdict: "as asked", "wider" (lost speed), "narrower" (lost accuracy), "missing" or "unknown".
      reason: the reason, unless the verdict is "as asked".
      note: how XLA arranged it: merged with another product, computed once, in a loop.
      device_limit: whether no program for this device could run it as asked.
    """

    path: str
    direction: str
    kind: str
    asked: str
    operands: str
    accumulation: str
    result: str
    by: str
    count: int
    verdict: str
    reason: str = ""
    note: str = ""
    device_limit: bool = False


def counted(rows: Sequence[ReceiptRow]) -> list[ReceiptRow]:
    """Merges equal rows and adds their counts."""
    counts: dict[ReceiptRow, int] = {}
    for row in rows:
        key = dataclasses.replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def written(dtypes: Sequence[str]) -> str:
    """Formats the dtypes of operands; equal dtypes are written once.

    >>> written(["float8_e4m3fn", "float8_e5m2"])
    'float8_e4m3fn x float8_e5m2'
    """
    return " x ".join(dict.fromkeys(dtypes))


def rows_of_sums(
    asked: Sequence[str], sums: Sequence[Sum], *, least: str | None, parameters: Sequence[tuple[int, ...]]
) -> list[ReceiptRow]:
    """Builds the rows of sums over devices.

    XLA joins sums and keeps no name of them, so the sums of the function are compared dtype by dtype.

    Args:
      asked: the dtype of each array that the traced program adds.
      sums: the sums of the compiled program.
      least: the policy's `reduce_dtype`; None without a policy.
      parameters: the dimensions of the parameters. A sum with these dimensions that the compiler added is a gradient's.
    """
    wanted = set(asked)
    arrays = [(each, dtype, dims) for each in sums for dtype, dims in each.arrays]
    explicit = [(each, dtype) for each, dtype, _ in arrays if each.written or (not each.named and dtype in wanted)]
    runs = {dtype for _, dtype in explicit}
    others = runs - wanted

    def row(goal: str, run: str, verdict: str, reason: str) -> ReceiptRow:
        doing = {(id(each), each.by) for each, dtype in explicit if dtype == run}
        by = " and ".join(sorted({by for _, by in doing}))
        return ReceiptRow("", "backward", "reduction", goal, run, run, run, by, max(len(doing), 1), verdict, reason)

    rows = []
    for dtype in sorted(wanted):
        goal = dtype if least is None or compared([least], [dtype]) != NARROWER else least
        run = dtype if dtype in runs else narrowest(sorted(others)) if others else ""
        others -= {run}
        if run:
            verdict = compared([goal], [run])
            who = "the function" if goal != dtype else "XLA"
            rows.append(row(goal, run, verdict, "" if verdict == AS_ASKED else f"{who} adds over devices in {run}"))
        else:
            verdict, reason = (UNKNOWN, UNCLEAR) if runs else (MISSING, "no sum over devices is in the program")
            rows.append(row(goal, "", verdict, reason))
    for dtype in sorted(others):
        verdict = compared([least], [dtype]) if least and not asked else UNKNOWN
        rows.append(row(least or "", dtype, verdict, "" if verdict == AS_ASKED else f"adds over devices in {dtype}"))
    added = [entry for entry in arrays if not (entry[0].written or (not entry[0].named and entry[1] in wanted))]
    return counted([*rows, *(_added(*entry, least, parameters) for entry in added)])


def _added(
    each: Sum, dtype: str, dims: tuple[int, ...], least: str | None, parameters: Sequence[tuple[int, ...]]
) -> ReceiptRow:
    """The row of an array in a sum that the compiler added, because an operand is divided over devices."""
    backward = each.module.backward or not each.named
    every = sum(map(math.prod, parameters))  # XLA may have joined all gradients in one array
    gradient = backward and (_ordered(dims) in set(map(_ordered, parameters)) or math.prod(dims) == every)
    goal = least if gradient and least else dtype
    verdict = compared([goal], [dtype])
    reason = "" if verdict == AS_ASKED else f"the compiler adds gradients over devices in {dtype}"
    if verdict == AS_ASKED and not each.named and least and compared([least], [dtype]) == NARROWER:
        verdict, reason = UNKNOWN, f"the compiler joined sums in {dtype}, which may be those of gradients"
    return ReceiptRow(
        path=each.module.path,
        direction="backward" if each.module.backward or gradient else "forward",
        kind="reduction",
        asked=goal,
        operands=dtype,
        accumulation=dtype,
        result=dtype,
        by=each.by,
        count=1,
        verdict=verdict,
        reason=reason,
        note="added by the compiler",
    )


def _ordered(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size > 1))


def rows_of_casts(asked: Sequence[str], cast: Sequence[str], rounds: Collection[str]) -> list[ReceiptRow]:
    """Builds the rows of arrays that the function itself rounds before it adds them over devices in a wider dtype.

    Args:
      asked: the dtype of each array that the traced program adds.
      cast: the narrowest dtype that each array was cast to since it was computed; empty for no cast.
      rounds: the dtypes that a policy names, which gradients may be rounded to.
    """
    rows = []
    for wide, narrow in zip(asked, cast, strict=True):
        if narrow and narrow not in rounds and compared([wide], [narrow]) == NARROWER:
            reason = f"the function itself rounds to {narrow} what it then adds over devices in {wide}"
            rows.append(ReceiptRow("", "backward", "reduction", wide, narrow, wide, wide, "cast", 1, NARROWER, reason))
    return counted(rows)


def rows_of_updates(
    found: Mapping[str, tuple[str, frozenset[str] | None]], rounded: Mapping[str, str] = MappingProxyType({})
) -> list[ReceiptRow]:
    """Builds the rows of parameters: the dtype asked for and the dtypes of the last arithmetic, by path.

    An update in a wider dtype is as asked: it loses nothing. Parameters that do not change have no row.

    Args:
      found: the dtypes asked for and run in, by path; None for dtypes that could not be read.
      rounded: the dtypes that the function itself rounds new parameters to, narrower than their stored dtypes.
    """
    rows = []
    for path, (asked, dtypes) in found.items():
        if itself := rounded.get(path):
            reason = f"the function itself rounds the new parameter to {itself}"
            rows.append(
                ReceiptRow(path, "update", "update", asked, itself, itself, itself, "XLA loop", 1, NARROWER, reason)
            )
        elif dtypes is None:
            rows.append(
                ReceiptRow(path, "update", "update", asked, "", "", "", "", 1, UNKNOWN, "nothing that could be read")
            )
        elif dtypes:
            run = narrowest(sorted(dtypes))
            narrower = compared([asked], [run]) == NARROWER
            reason = f"the update is computed in {run}, or rounded to it" if narrower else ""
            verdict = NARROWER if narrower else AS_ASKED
            rows.append(ReceiptRow(path, "update", "update", asked, run, run, run, "XLA loop", 1, verdict, reason))
    return rows


_HALF = tuple(map(str, HALF))
_SUMS = {"reduce": "a sum", "reduce-window": "a sum over windows", "scatter": "a scatter"}
_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")


def rows_of_accumulations(program: HloProgram) -> list[ReceiptRow]:
    """Builds a row for each sum of many terms whose accumulator is in half precision; sums in float32 have no row."""
    return counted(
        [_row(each) for computation in program.computations.values() for each in _sums(program, computation)]
    )


def _sums(program: HloProgram, computation: Computation) -> Iterator[Instruction]:
    if not computation.mentions(*(f" {name}(" for name in _SUMS)):
        return
    for each in computation:
        half = each.opcode in _SUMS and dtype_of(each.type) in _HALF
        adds = (program.computations[name].root.opcode == "add" for name in each.called("to_apply"))
        if half and any(adds) and _terms(computation, each) >= MANY:
            yield each


def _terms(computation: Computation, each: Instruction) -> int:
    """The maximum number of terms of an element of the result."""
    if each.opcode == "reduce-window":
        found = _WINDOW.search(each.attributes)
        return math.prod(map(int, found[1].split("x"))) if found else 0
    if each.opcode == "scatter" and "unique_indices=true" in each.attributes:
        return 1
    sizes = [math.prod(dims) for name in each.operands for _, dims in _shapes(computation, name)]
    of_result = math.prod(shapes_of(each.type)[0][1])
    if each.opcode == "scatter":  # all updates may be for one element
        return sizes[-1] if sizes else 0
    return sizes[0] // max(of_result, 1) if sizes else 0


def _shapes(computation: Computation, name: str) -> list[tuple[str, tuple[int, ...]]]:
    return shapes_of(computation.instructions[name].type)[:1] if name in computation.instructions else []


def _row(each: Instruction) -> ReceiptRow:
    module, dtype = module_of(each), dtype_of(each.type)
    return ReceiptRow(
        path=module.path,
        direction="backward" if module.backward else "forward",
        kind="accumulation",
        asked="float32",
        operands=dtype,
        accumulation=dtype,
        result=dtype,
        by=each.opcode,
        count=1,
        verdict=NARROWER,
        reason=f"{_SUMS[each.opcode]} adds many terms in {dtype}",
    )
