"""Formats the result of a search for a mesh: a line for each mesh, the best, and what was left out."""

from typing import Any

from mpjax.plan.devices import GPUS, HOST
from mpjax.plan.estimate import Estimate
from mpjax.plan.meshes import Search, verdict
from mpjax.plan.table import duration, size
from mpjax.report.wording import rate


UNPLANNED = (
    "Meshes have the axes that a run can have: data, fsdp, context and tensor. There are no stages of a pipeline, and "
    "norms are divided over tensor with --mesh.sequence alone."
)


def search_title(search: Search) -> str:
    """Formats the GPU, its number, the batch, the memory and the links of a search in two lines."""
    gpu, plan = GPUS[search.gpu], search.plans[0] if search.plans else None
    what = f", {plan.batch} examples a step, {plan.policy}" if plan else ""
    memory = f"; {size(plan.limit)} of {size(gpu.memory)} for the run" if plan else ""
    between = f"{gpu.network / 1e9:g} GB/s per GPU" if gpu.network else "not known"
    return (
        f"meshes of {search.devices} x {gpu.name}{what}{memory}\n"
        f"links within a host of {HOST}: {gpu.link / 1e9:g} GB/s per GPU; between hosts: {between}"
    )


def mesh_rows(search: Search) -> list[list[str]]:
    """Lists the cells of each compiled mesh, in the order of `MESH_HEADS`."""
    return [_cells(plan, search.best) for plan in search.plans]


MESH_HEADS = (
    "data x fsdp x context x tensor",
    "memory",
    "step",
    "all - none hidden",
    "{}/s a GPU",
    "efficiency",
    "waits",
    "sent in hosts",
    "between",
    "why not",
)
"""The heads of the table. In the fifth, the word for tokens or examples."""


def table_of_meshes(search: Search):
    """Builds a `rich` table of the compiled meshes, the fastest that fits first."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    tokens = bool(search.plans and search.plans[0].tokens)
    for number, head in enumerate(MESH_HEADS):
        words = head.format("tokens" if tokens else "examples")
        table.add_column(words, justify="left" if number in (0, len(MESH_HEADS) - 1) else "right", overflow="fold")
    for cells in mesh_rows(search):
        table.add_row(*cells)
    return table


def _cells(plan: Estimate, best: Estimate | None) -> list[str]:
    mesh, memory, why = " x ".join(map(str, plan.mesh.values())), size(plan.memory.total), verdict(plan, best)
    expected, sent = plan.communication.expected, plan.communication.sent
    if expected is None or sent is None:
        return [mesh, memory, "", "", "", "", "", "", "", why]
    return [
        mesh,
        memory,
        duration(plan.expected_seconds),
        f"{duration(expected.all_hidden)} - {duration(expected.none_hidden)}",
        rate(plan.items_per_gpu),
        f"{expected.efficiency:.1%}",
        duration(expected.exposed),
        size(sent.within),
        size(sent.between),
        why,
    ]


def conclusions(search: Search) -> list[str]:
    """Formats the mesh that was found as flags, and counts what was not compiled, a line each."""
    best = search.best
    if best:
        lines = [f"best: {flags(best)}"]
    elif search.plans:
        least = min(search.plans, key=lambda plan: plan.memory.total)
        lines = [
            f"no mesh fits: {flags(least)} takes the least, {size(least.memory.total)} of {size(least.limit)}; "
            "take more GPUs, fewer examples, or --training.remat full"
        ]
    else:
        least_held = min(search.too_large.values())
        lines = [
            f"no mesh fits: parameters and optimizer state alone take {size(least_held)} on each GPU or more; "
            "take more GPUs"
        ]
    if search.too_large:
        lines.append(f"not compiled, state alone is larger than memory: {len(search.too_large)}")
    if search.beyond:
        lines.append(f"not compiled, beyond meshes that are slower or do not fit: {search.beyond}")
    return [*lines, *(f"left out, {reason}: {count}" for reason, count in search.left_out.items())]


def flags(plan: Estimate) -> str:
    """Formats the mesh of a plan as flags of a run."""
    sizes = " ".join(f"--mesh.{axis} {count}" for axis, count in plan.mesh.items())
    return f"{sizes} --mesh.sequence" if plan.sequence else sizes


def as_json(search: Search) -> dict[str, Any]:
    """The result as JSON, without the plans themselves, whose order is that of `meshes`."""
    return {
        "gpu": search.gpu,
        "devices": search.devices,
        "best": dict(search.best.mesh) if search.best else None,
        "meshes": [
            {
                "mesh": dict(plan.mesh),
                "sequence": plan.sequence,
                "fits": plan.fits,
                "bytes": plan.memory.total,
                "seconds": plan.expected_seconds,
                "items_per_gpu": plan.items_per_gpu,
                "why": verdict(plan, search.best),
            }
            for plan in search.plans
        ],
        "too_large": [{"mesh": sizes.by_axis, "bytes": held} for sizes, held in search.too_large.items()],
        "beyond": search.beyond,
        "left_out": dict(search.left_out),
    }
