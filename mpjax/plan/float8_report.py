"""Says whether float8 products pay off: compares plans with and without them, and lists the layers that lose."""

import shlex
from collections.abc import Sequence

from mpjax.plan.estimate import Estimate
from mpjax.plan.roofline import COPIES, LAUNCH, PRODUCTS
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.presets import get_policy


def comparisons(plans: Sequence[Estimate]) -> list[str]:
    """Compares each plan with float8 to the plans without, a line for each, and lists the layers where float8 loses.

    If there is no plan without float8, the line names the flag that adds one.
    """
    lines = []
    for plan in (plan for plan in plans if plan.float8):
        others = [other for other in plans if _is_without(other, plan)]
        for other in others:
            lines += [_compared(plan, other), *_losing(plan)]
        if not others:
            without = "float32" if get_policy(plan.policy).compute_dtype == FLOAT32 else "mixed_bfloat16"
            lines.append(f"to see what float8 saves in {plan.title}: --policies {without} {shlex.quote(plan.policy)}")
    return lines


def _is_without(other: Estimate, plan: Estimate) -> bool:
    ours, theirs = get_policy(plan.policy), get_policy(other.policy)
    same = (other.gpu, other.xla, other.devices) == (plan.gpu, plan.xla, plan.devices)
    return same and not theirs.recipes and ours.compute_dtype == theirs.compute_dtype


def _compared(plan: Estimate, other: Estimate) -> str:
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


def _losing(plan: Estimate) -> list[str]:
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
