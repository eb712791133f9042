"""Formats how a step scales to more GPUs: one table per kind of GPU, one column per policy."""

from collections.abc import Sequence

from mpjax.plan.devices import GPUS, HOST
from mpjax.plan.estimate import Estimate
from mpjax.plan.table import columns, duration


def scaling_title(plans: Sequence[Estimate]) -> str:
    """Returns the title of a scaling table in two lines, or what to write instead if it would be empty."""
    first, gpu = plans[0], GPUS[plans[0].gpu]
    axis = f"--mesh.{first.communication.grows}"
    if not first.communication.scaling:
        return f"{axis} is 1, so the program says nothing of more GPUs: for scaling, plan --devices {2 * first.devices}"
    between = f"{gpu.network / 1e9:g} GB/s per GPU" if gpu.network else "not known"
    return (
        f"expected step and efficiency, {first.batch / first.devices:g} examples on each GPU, {axis} grows\n"
        f"links within a host of {HOST}: {gpu.link / 1e9:g} GB/s per GPU; between hosts: {between}"
    )


def scaling_table(plans: Sequence[Estimate]):
    """Builds a rich table of the time of a step and its efficiency by number of GPUs."""
    return columns("GPUs", plans, scaling_rows(plans))


def scaling_rows(plans: Sequence[Estimate]) -> list[tuple[str, list[str]]]:
    """Returns for each number of GPUs the number, and each policy's time of a step and efficiency."""
    found: dict[int, list[str]] = {}
    for plan in plans:
        for scale in plan.communication.scaling:
            found.setdefault(scale.devices, []).append(f"{duration(scale.timing.step)} {scale.efficiency:6.1%}")
    return [(str(devices), cells) for devices, cells in found.items()]
