"""Compares what a compiled program runs with what was asked for: one row for each product, sum and update."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from mpjax.plan.asked import Asked
from mpjax.plan.dtype_order import AS_ASKED, HALF, MISSING, NARROWER, UNKNOWN, compared, narrowest
from mpjax.plan.pairing import NOWHERE, UNCLEAR, Pair
from mpjax.plan.runs import Run, Target
from mpjax.plan.sums_and_updates import Sum
from mpjax.precision.casting.flops import TENSORFLOAT32
from mpjax.precision.product_dtypes import AskedDtypes


PRODUCTS = ("product", "convolution", "attention", "kernel")
"""Kinds of rows that are counted as products."""

NOT_TRACED = "no such product is in the traced function"
NO_NAME = "XLA kept no name of it, so the module and its rule are not known"
NOT_ASKED = "neither a traced function nor a policy says what was asked for"

Wanted = Callable[[str], AskedDtypes | None]
"""A function from module path to what a policy asks for in products there; None without a policy."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What several products of one module, pass and kind run in; or sums over devices, or updates.

    Attributes:
      path: the module path; empty outside of modules.
      direction: "forward", "backward", "update", or "other" for what is not differentiated.
      kind: "product", "convolution", "attention", "kernel" (of Pallas, with products inside), "reduction" (a sum over
        devices) or "update" (of a parameter).
      asked: the dtype asked for, or both of the operands; empty if it is not known.
      operands: the dtype of the operands that the program multiplies or adds, likewise; empty if nothing does.
      accumulation: the dtype of the sums; empty if it is not known.
      result: the dtype of the result.
      by: the library or kernel that does it.
      count: how many. What stands in a loop counts once.
      verdict: "as asked", "wider" (lost speed), "narrower" (lost accuracy), "missing" or "unknown".
      reason: why, unless as asked.
      note: how XLA arranged it: merged with another product, computed once, in a loop.
      device_limit: whether no program for this device could do otherwise.
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


def rows_of_products(pairs: Sequence[Pair], wanted: Wanted, target: Target, *, traced: bool) -> list[Row]:
    """Returns the rows of products, convolutions and attentions; equal ones are counted in one row.

    A policy applies to what is differentiated: an optimizer's own products, and those in `mpjax.full_precision`, are
    asked for as they were traced. If nothing is differentiated, it applies to all.

    Args:
      pairs: what was asked for and what runs.
      wanted: the policy.
      target: what the program was compiled for.
      traced: whether the traced program is known; if not, the policy alone says what was asked for.
    """
    gradients = any(pair.asked.differentiated for pair in pairs if pair.asked)
    return counted([_row_of_pair(pair, wanted, target, gradients, traced) for pair in pairs])


def counted(rows: Sequence[Row]) -> list[Row]:
    """Returns rows without equal ones, whose counts are added."""
    counts: dict[Row, int] = {}
    for row in rows:
        key = dataclasses.replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def _row_of_pair(pair: Pair, wanted: Wanted, target: Target, gradients: bool, traced: bool) -> Row:
    asked, run = pair.asked, pair.run
    about = asked or run
    assert about is not None
    module, policy = about.module, wanted(about.module.path)
    apart = gradients and asked is not None and not asked.differentiated
    free = apart or (asked is not None and asked.kept)
    own = asked.operands if asked else ()
    ours = own if free or policy is None else _asked_by_policy(policy, own or about.operands, module.backward)
    if run is None:
        verdict, reason, limit = MISSING if pair.note == NOWHERE else UNKNOWN, pair.note, False
    elif asked is None and (traced or not run.named):
        verdict, reason, limit = UNKNOWN, NOT_TRACED if traced else NO_NAME, False
    elif not ours:
        verdict, reason, limit = UNKNOWN, NOT_ASKED, False
    elif apart and "float32" in ours and set(run.operands) == {TENSORFLOAT32}:
        verdict, reason, limit = AS_ASKED, "", False  # JAX's default precision, to which no policy objects
    else:
        verdict, reason, limit = _verdict(asked, run, ours, target)
    notes = [pair.note if run else "", "in a loop, counted once" if asked and asked.in_loop else ""]
    return Row(
        path=module.path,
        direction="backward" if module.backward else "other" if apart else "forward",
        kind=about.kind,
        asked=written(ours),
        operands=written(run.operands) if run else "",
        accumulation=run.accumulation if run else "",
        result=run.result if run else "",
        by=run.by if run else "",
        count=1,
        verdict=verdict,
        reason=reason,
        note=", ".join(filter(None, notes)),
        device_limit=limit,
    )


def _asked_by_policy(policy: AskedDtypes, traced: Sequence[str], backward: bool) -> Sequence[str]:
    """Returns the dtypes that a policy asks for in a product that was traced with operands of some dtypes."""
    if any(dtype.startswith("float8") for dtype in traced):
        return (str(policy.compute),) * len(traced) if policy.refused else traced
    if policy.required and policy.recipe is not None:
        return (str(policy.recipe.gradient if backward else policy.recipe.forward), str(policy.recipe.forward))
    return (str(policy.compute),) * len(traced)


def written(dtypes: Sequence[str]) -> str:
    """Formats the dtypes of operands: one if they are equal.

    >>> written(["float8_e4m3fn", "float8_e5m2"])
    'float8_e4m3fn x float8_e5m2'
    """
    return " x ".join(dict.fromkeys(dtypes))


def _verdict(asked: Asked | None, run: Run, ours: Sequence[str], target: Target) -> tuple[str, str, bool]:
    """Returns the verdict, the reason, and whether the device can do no other."""
    verdict = compared(ours, run.operands)
    if verdict != AS_ASKED:
        return (verdict, *_why(asked, run, ours, target))
    if run.accumulation in HALF:
        return NARROWER, f"adds up in {run.accumulation}", False
    if asked and compared([asked.result], [run.result]) == NARROWER:
        return NARROWER, f"rounds the result to {run.result}; the function asks for {asked.result}", False
    return AS_ASKED, "", False


def _why(asked: Asked | None, run: Run, ours: Sequence[str], target: Target) -> tuple[str, bool]:
    """Returns why operands are not in the dtype asked for, and whether the device can do no other."""
    runs = written(run.operands)
    if asked and asked.quantised:
        return f"quantised to {written(ours)} and widened again: the product itself is in {runs}", False
    if asked and compared(ours, asked.operands) != AS_ASKED:
        return f"the function itself computes it in {written(asked.operands)}", False
    if TENSORFLOAT32 in run.operands and "float32" in ours:
        return (
            "JAX's default precision rounds float32 operands to tensorfloat32; "
            'jax.config.update("jax_default_matmul_precision", "highest") keeps them'
        ), False
    narrow = all(dtype in HALF or dtype.startswith("float8") for dtype in ours)
    if target.platform == "cpu" and narrow and set(run.operands) == {"float32"}:
        return f"XLA computes {written(ours)} products of a CPU in float32", True
    return f"XLA computes it in {runs}", False


def rows_of_sums(
    asked: Sequence[str], sums: Sequence[Sum], *, least: str | None, parameters: Sequence[tuple[int, ...]]
) -> list[Row]:
    """Returns the rows of sums over devices.

    XLA joins sums and keeps no name of them, so those that the function asks for are compared dtype by dtype.

    Args:
      asked: the dtype of each array that the traced program adds.
      sums: the sums of the compiled program.
      least: the policy's `reduce_dtype`; None without a policy.
      parameters: the dimensions of the parameters. A sum that the compiler added and that has these is a gradient's.
    """
    wanted = set(asked)
    arrays = [(each, dtype, dims) for each in sums for dtype, dims in each.arrays]
    explicit = [(each, dtype) for each, dtype, _ in arrays if each.written or (not each.named and dtype in wanted)]
    runs = {dtype for _, dtype in explicit}
    others = runs - wanted

    def row(goal: str, run: str, verdict: str, reason: str) -> Row:
        doing = {(id(each), each.by) for each, dtype in explicit if dtype == run}
        by = " and ".join(sorted({by for _, by in doing}))
        return Row("", "backward", "reduction", goal, run, run, run, by, max(len(doing), 1), verdict, reason)

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
) -> Row:
    """Returns the row of an array in a sum that the compiler added, because an operand is divided over devices."""
    backward = each.module.backward or not each.named
    every = sum(map(math.prod, parameters))  # XLA may have joined all gradients in one array
    gradient = backward and (_ordered(dims) in set(map(_ordered, parameters)) or math.prod(dims) == every)
    goal = least if gradient and least else dtype
    verdict = compared([goal], [dtype])
    reason = "" if verdict == AS_ASKED else f"the compiler adds gradients over devices in {dtype}"
    if verdict == AS_ASKED and not each.named and least and compared([least], [dtype]) == NARROWER:
        verdict, reason = UNKNOWN, f"the compiler joined sums in {dtype}, which may be those of gradients"
    return Row(
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


def rows_of_updates(found: Mapping[str, tuple[str, frozenset[str] | None]]) -> list[Row]:
    """Returns the rows of parameters: the dtype asked for and the dtypes of the last arithmetic, by path.

    An update in a wider dtype is as asked: it loses nothing. Parameters that do not change have no row.
    """
    rows = []
    for path, (asked, dtypes) in found.items():
        if dtypes is None:
            rows.append(Row(path, "update", "update", asked, "", "", "", "", 1, UNKNOWN, "nothing that could be read"))
        elif dtypes:
            run = narrowest(sorted(dtypes))
            narrower = compared([asked], [run]) == NARROWER
            reason = f"the update is computed in {run}" if narrower else ""
            verdict = NARROWER if narrower else AS_ASKED
            rows.append(Row(path, "update", "update", asked, run, run, run, "XLA loop", 1, verdict, reason))
    return rows
