"""Searches the fastest mesh of a step on several GPUs: lists those that a run can have, and compiles some of them."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from mpjax.config.plan import GpuName
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, DATA, FSDP, TENSOR
from mpjax.plan.compiled import PlannedStep
from mpjax.plan.devices import GPUS, HOST
from mpjax.plan.estimate import Estimate, estimates
from mpjax.plan.memory import held_bytes
from mpjax.plan.target import mesh_of


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a mesh."""

    tensor: int
    fsdp: int
    data: int
    context: int = 1

    @property
    def by_axis(self) -> dict[str, int]:
        """The size of each axis, in the order of a mesh."""
        return {DATA: self.data, FSDP: self.fsdp, CONTEXT: self.context, TENSOR: self.tensor}

    @property
    def inside(self) -> tuple[int, int]:
        """The sizes of the axes that divide a model's work on an example: `context`, and `tensor`."""
        return self.context, self.tensor


@dataclasses.dataclass(frozen=True)
class Choice:
    """The meshes for a number of devices.

    Attributes:
      possible: the meshes that a run can have, in ascending order of `context`, `tensor` and `fsdp`.
      left_out: the number of meshes that it cannot or should not have, by reason.
    """

    possible: tuple[Sizes, ...]
    left_out: Mapping[str, int]


def choice_of(devices: int, *, batch: int, accumulate: int, refusal: Callable[[int, int], str]) -> Choice:
    """Lists the meshes for a number of devices.

    The groups of `tensor` are within a host; with `context`, and with `context` and `fsdp`, they are within a host or
    whole hosts.

    Args:
      devices: the number of devices.
      batch: examples per step, over all devices.
      accumulate: the number of micro-batches per batch.
      refusal: a function from sizes of `context` and `tensor` to the reason why the model cannot be divided so; empty
        if it can.
    """
    possible = []
    left_out: collections.Counter[str] = collections.Counter()
    refusal = functools.cache(refusal)
    for context, tensor in itertools.product(_divisors(devices), repeat=2):
        for fsdp in _divisors(devices // tensor // context) if devices % (tensor * context) == 0 else ():
            sizes = Sizes(tensor, fsdp, devices // tensor // context // fsdp, context)
            if not _in_hosts(tensor, devices):
                left_out[f"tensor groups reach beyond a host of {HOST} GPUs"] += 1
            elif not all(_whole_hosts(parts, devices) for parts in (context * tensor, fsdp * context * tensor)):
                left_out[f"fsdp x context x tensor is neither within a host of {HOST} GPUs nor whole hosts"] += 1
            elif batch % (sizes.data * fsdp * accumulate):
                micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
                left_out[f"a batch of {batch} does not divide by data x fsdp{micro}"] += 1
            elif reason := refusal(1, tensor) or refusal(context, tensor):
                left_out[reason] += 1
            else:
                possible.append(sizes)
    return Choice(tuple(possible), dict(left_out))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _in_hosts(size: int, devices: int) -> bool:
    """True if groups of `size` neighbours lie within hosts."""
    return devices <= HOST or HOST % size == 0


def _whole_hosts(size: int, devices: int) -> bool:
    """True if groups of `size` neighbours lie within hosts, or are whole hosts."""
    return _in_hosts(size, devices) or size % HOST == 0


def ends(inside: tuple[int, int], possible: Sequence[Sizes]) -> list[Sizes]:
    """Chooses the meshes to compile first for sizes of `context` and `tensor`.

    They are the one that fills a host, and the one with the largest `fsdp`.
    """
    row = [sizes for sizes in possible if sizes.inside == inside]
    whole = min(row, key=lambda sizes: abs(sizes.context * sizes.tensor * sizes.fsdp - HOST))
    return list(dict.fromkeys([whole, row[-1]]))


def neighbours(sizes: Sizes, possible: Sequence[Sizes]) -> list[Sizes]:
    """Lists the meshes next to one: with `fsdp` a size smaller or larger, or a factor of 2 between two axes.

    The two axes are `fsdp` and either `tensor` or `context`, or these two.

    >>> around = [Sizes(1, 8, 4), Sizes(1, 16, 2), Sizes(1, 32, 1), Sizes(2, 8, 2), Sizes(2, 16, 1)]
    >>> [(near.tensor, near.fsdp, near.data) for near in neighbours(Sizes(1, 16, 2), around)]
    [(1, 8, 4), (1, 32, 1), (2, 8, 2)]
    """
    row = [other for other in possible if other.inside == sizes.inside]
    place = row.index(sizes)
    beside = row[max(place - 1, 0) : place] + row[place + 1 : place + 2]

    def across(other: Sizes) -> bool:
        factors = [(other.tensor, sizes.tensor), (other.context, sizes.context), (other.fsdp, sizes.fsdp)]
        return other.data == sizes.data and sorted(a / b for a, b in factors) == [0.5, 1, 2]

    return beside + [other for other in possible if across(other)]


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      gpu: the kind of GPU.
      devices: the number of GPUs.
      plans: the estimates of the meshes that were compiled: first those that fit, the fastest first, then the others,
        the smallest first.
      too_large: bytes of state and batch on a GPU, by mesh, of meshes that take more than a run may use before a step
        begins. They were not compiled.
      beyond: the number of meshes that were not compiled, because those before them were slower or did not fit.
      left_out: the number of meshes that the run cannot or should not have, by reason.
    """

    gpu: GpuName
    devices: int
    plans: tuple[Estimate, ...]
    too_large: Mapping[Sizes, int]
    beyond: int
    left_out: Mapping[str, int]

    @property
    def best(self) -> Estimate | None:
        """The plan of the fastest mesh that fits; None if none fits."""
        return self.plans[0] if self.plans and self.plans[0].fits else None


def search_mesh(
    gpu: GpuName,
    step: PlannedStep,
    devices: int,
    *,
    attention: str = "auto",
    memory_fraction: float = 0.75,
    say: Callable[[str], object] = lambda _: None,
) -> Search:
    """Searches the mesh with the shortest time to expect, among those that fit.

    Each mesh that is compared is compiled whole. Which meshes are compared: see `climb`.

    Args:
      gpu: the kind of GPU.
      step: the step; the sizes of its mesh are ignored.
      devices: the number of GPUs.
      attention: as in `mpjax.plan.compiled.start`.
      memory_fraction: fraction of a GPU's memory that a run may use.
      say: called with a line before meshes are compiled.

    Raises:
      UsageError: no mesh is possible, the network between hosts of this GPU is unknown, or as `estimates`.
    """
    if devices > HOST and GPUS[gpu].network is None:
        raise UsageError(f"--gpu {gpu}: the network between hosts is not known: write --devices {HOST}, or less")
    choice = choice_of(
        devices,
        batch=step.batch_size,
        accumulate=step.accumulate,
        refusal=lambda context, tensor: _refusal(step, gpu, context, tensor),
    )
    if not choice.possible:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in choice.left_out.items())
        raise UsageError(
            f"--search mesh: no mesh of {devices} GPUs is possible: {reasons}; write --data.batch_size "
            f"{devices * step.accumulate}, or a multiple"
        )
    limit = round(GPUS[gpu].memory * memory_fraction)
    held = {sizes: _held(step, gpu, sizes, devices) for sizes in choice.possible}
    fitting = [sizes for sizes in choice.possible if held[sizes] <= limit]

    def compiled(meshes: Sequence[Sizes]) -> list[Estimate]:
        say(f"compiling the step for {len(meshes)} of {len(fitting)} meshes of {devices} {gpu}")
        steps = [dataclasses.replace(step, sizes=sizes.by_axis) for sizes in meshes]
        return estimates(
            [gpu], steps, devices=devices, attention=attention, most=0, memory_fraction=memory_fraction, fit=False
        )

    plans = climb(fitting, compiled)
    return Search(
        gpu=gpu,
        devices=devices,
        plans=tuple(sorted(plans.values(), key=_rank)),
        too_large={sizes: size for sizes, size in held.items() if size > limit},
        beyond=len(fitting) - len(plans),
        left_out=choice.left_out,
    )


def climb(
    possible: Sequence[Sizes], compiled: Callable[[Sequence[Sizes]], Sequence[Estimate]]
) -> dict[Sizes, Estimate]:
    """Compiles meshes until none next to the fastest that fits is left, and returns all that were compiled.

    It begins with the `ends` of the two smallest sizes of `tensor`, and goes on to larger ones, and to larger sizes of
    `context`, until a mesh fits.

    Args:
      possible: the meshes, in ascending order of `context`, `tensor` and `fsdp`.
      compiled: a function from meshes, at least one, to their estimates.
    """
    plans: dict[Sizes, Estimate] = {}

    def add(meshes: Sequence[Sizes]) -> None:
        if meshes:
            plans.update(zip(meshes, compiled(meshes), strict=True))

    rows = list(dict.fromkeys(sizes.inside for sizes in possible))
    add([sizes for inside in rows[:2] for sizes in ends(inside, possible)])
    for inside in rows[2:]:
        if _fastest(plans) is None:
            add(ends(inside, possible))
    while (best := _fastest(plans)) and (new := [each for each in neighbours(best, possible) if each not in plans]):
        add(new)
    return plans


def _rank(plan: Estimate) -> tuple[bool, float]:
    return not plan.fits, plan.expected_seconds if plan.fits else plan.memory.total


def _fastest(plans: Mapping[Sizes, Estimate]) -> Sizes | None:
    fitting = [sizes for sizes, plan in plans.items() if plan.fits]
    return min(fitting, key=lambda sizes: plans[sizes].expected_seconds, default=None)


def _refusal(step: PlannedStep, gpu: GpuName, context: int, tensor: int) -> str:
    """The reason why a run cannot be divided over so many devices, from its own error; empty if it can."""
    if context == tensor == 1:
        return ""
    if tensor > 1 and step.plan.policy.recipes:
        # It ends the process: "Check failed: reduction_kind.has_value()", jaxlib 0.12.0.1.
        return "float8 over tensor, which ends the compiler of XLA for GPUs (jaxlib 0.12)"
    try:
        with step.x64_if_float64():
            step.build_on(mesh_of(gpu, context * tensor, **Sizes(tensor, 1, 1, context).by_axis))
    except UsageError as error:
        return "context does not divide this run" if context > 1 else str(error).partition(":")[0]
    return ""


def _held(step: PlannedStep, gpu: GpuName, sizes: Sizes, devices: int) -> int:
    with step.x64_if_float64():
        _, (state, batch) = step.on(mesh_of(gpu, devices, **sizes.by_axis))
    return held_bytes(state, batch)


def verdict(plan: Estimate, best: Estimate | None) -> str:
    """Says in a word why a mesh is not the best: memory, kernels, or the axes whose exchanges it waits for.

    Kernels stand for more time of kernels than more time of waiting. The best is "best".
    """
    if not plan.fits:
        return "memory"
    if best is None or plan is best:
        return "best"
    mine, other = plan.communication.expected, best.communication.expected
    if mine is None or other is None:
        return ""
    exposed = mine.exposed - other.exposed
    if (mine.step - mine.exposed) - (other.step - other.exposed) >= exposed:
        return "kernels"
    more = {axes: seconds - other.by_axes.get(axes, 0.0) for axes, seconds in mine.by_axes.items()}
    return f"waits for {max(more, key=lambda axes: more[axes])}"
