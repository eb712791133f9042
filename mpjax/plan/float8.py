"""Compares a step with products in float8 with the step without: time by products and by conversions, layer by layer.

A product in float8 takes half the time at the data sheets' rates. Finding the largest value of an operand and casting
it are kernels of their own, which move bytes and are launched.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpjax.plan.devices import Gpu
from mpjax.plan.hlo import Computation, Instruction, Program, shapes_of
from mpjax.plan.kernels import moved
from mpjax.plan.order import counted, order_of
from mpjax.plan.roofline import COPIES, LAUNCH, PRODUCTS
from mpjax.plan.source import module_of
from mpjax.precision.casting.flops import dtype_in, product_flops
from mpjax.precision.casting.jaxprs import scope_of
from mpjax.precision.casting.walk import bodies
from mpjax.precision.dtypes import is_floating
from mpjax.precision.policy import get_policy


if TYPE_CHECKING:
    from mpjax.plan.estimate import Estimate


@dataclasses.dataclass(frozen=True)
class Layer:
    """What float8 saves and costs in the layers of one path, in one step.

    Attributes:
      module: the path with `*` for indices.
      saved: seconds that the products take less than in bfloat16.
      spent: seconds of the kernels that find scales and cast, at most: what XLA fused with them is counted too.
      kernels: how many kernels these are.
    """

    module: str
    saved: float
    spent: float
    kernels: int


def layers_of(jaxpr: Any, program: Program, gpu: Gpu) -> list[Layer]:
    """Returns the layers that multiply in float8, by path.

    Args:
      jaxpr: the traced step.
      program: the compiled step.
      gpu: the GPU that it is compiled for.
    """
    saved: collections.Counter = collections.Counter()
    for body in bodies(jaxpr):
        times = math.prod(eqn.params["length"] for eqn in body.callers if eqn.primitive.name == "scan")
        for eqn in body.eqns:
            if (operations := product_flops(eqn)) and is_floating(eqn.invars[0].aval):
                dtype = dtype_in(eqn, body)
                if dtype.startswith("float8"):
                    less = operations * (1 / gpu.rate("bfloat16") - 1 / gpu.rate(dtype))
                    saved[_pattern(scope_of(eqn, body.scope))] += times * less / PRODUCTS
    spent: collections.Counter = collections.Counter()
    kernels: collections.Counter = collections.Counter()
    for launch, times in counted(order_of(program)):
        module = _pattern(module_of(launch.instruction).path)
        if module in saved and _converts(program, launch.instruction):
            bytes_moved = moved(program, launch.computation, launch.instruction)
            spent[module] += times * (bytes_moved / (gpu.bandwidth * COPIES) + LAUNCH)
            kernels[module] += times
    return [Layer(module, saved[module], spent[module], kernels[module]) for module in sorted(saved)]


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


def _converts(program: Program, each: Instruction) -> bool:
    """Returns True for a kernel that casts to float8, or that finds a largest value."""
    if each.opcode not in ("fusion", "convert", "reduce"):
        return False
    if any(dtype.startswith("f8") for dtype, _ in shapes_of(each.type)):
        return True
    called = [program.computations[name] for name in each.called("calls")]
    return any(_finds_largest(program, fused) for fused in called)


def _finds_largest(program: Program, fused: Computation) -> bool:
    """Returns True if a fusion does nothing but reduce to the largest absolute value."""
    reduces = [each for each in fused if each.opcode == "reduce"]
    inside = [program.computations[name] for each in reduces for name in each.called("to_apply")]
    return bool(inside) and all(any(each.opcode == "maximum" for each in one) for one in inside)


def comparisons(plans: Sequence["Estimate"]) -> list[str]:
    """Returns a line for each plan with float8 that has one without beside it, and those that say where it loses."""
    lines = []
    for plan in (plan for plan in plans if plan.float8):
        for other in (other for other in plans if _is_without(other, plan)):
            lines += [_compared(plan, other), *_losing(plan)]
    return lines


def _is_without(other: "Estimate", plan: "Estimate") -> bool:
    ours, theirs = get_policy(plan.policy), get_policy(other.policy)
    same = (other.gpu, other.xla, other.devices) == (plan.gpu, plan.xla, plan.devices)
    return same and not theirs.recipes and ours.compute_dtype == theirs.compute_dtype


def _compared(plan: "Estimate", other: "Estimate") -> str:
    ratio = plan.expected_seconds / other.expected_seconds
    parts = {
        "products": (plan.roofline.compute - other.roofline.compute) / PRODUCTS,
        "traffic": (plan.roofline.traffic - other.roofline.traffic) / COPIES,
        "launches": (plan.traffic.kernels - other.traffic.kernels) * LAUNCH,
    }
    told = ", ".join(f"{name} {_signed(seconds)}" for name, seconds in parts.items())
    verdict = "wins" if ratio <= 0.9 else "gains little" if ratio < 1 else "loses"
    memory = (plan.memory.temporary - other.memory.temporary) / 1e9
    return (
        f"{plan.title} {verdict}: its step is expected to take {ratio:.2f} of the time of {other.title}. "
        f"At full rates: {told}. "
        f"Temporary memory {memory:+.2f} GB."
    )


def _signed(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f} ms"


def _losing(plan: "Estimate") -> list[str]:
    losing = [layer for layer in plan.float8 if layer.spent > layer.saved]
    if not losing:
        return []
    told = (
        f'  "{layer.module}": products save {1e6 * layer.saved:.0f} us, {layer.kernels} kernels of conversion take at '
        f"most {1e6 * layer.spent:.0f} us"
        for layer in losing
    )
    rules = " ".join(f'"{layer.module}" bfloat16' for layer in losing)
    head = f"float8 may not pay in {len(losing)} of {len(plan.float8)} kinds of layers"
    return [f"{head}; without it there: --precision.rules {rules}", *told]
