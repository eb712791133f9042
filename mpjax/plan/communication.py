"""Predicts the communication of a step: bytes by mesh axis, seconds per link, and scaling to more GPUs."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from mpjax.mesh_axes import DATA
from mpjax.plan.devices import HOST, Gpu
from mpjax.plan.groups import Groups, along, axes_of, groups_of
from mpjax.plan.timeline import Event, Start, StepTime, simulate
from mpjax.training.mesh import settle


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far apart the devices of a group are.

    Attributes:
      size: number of devices.
      near: number of the devices that share one host; equal to `size` if all do.
    """

    size: int
    near: int


def reach_of(groups: Groups) -> Reach:
    """The reach of the group that has the smallest share of its devices on one host.

    Its `near` is the fewest devices that it has on any of its hosts. Devices are placed in order: the first `HOST`
    devices are on the first host.
    """
    reaches = [Reach(len(group), min(collections.Counter(id // HOST for id in group).values())) for group in groups]
    return min(reaches, key=lambda reach: (reach.near / reach.size, -reach.size))


def duration_of(kind: str, size: int, reach: Reach, gpu: Gpu) -> float | None:
    """Predicts the seconds of a collective.

    A ring through several hosts enters and leaves each host by the network adapters of all its members there. NCCL adds
    up their bandwidth (NVIDIA/nccl, issue 412). All groups exchange at once, so each GPU has only its own part of the
    network.

    Args:
      kind: "all-reduce", "all-gather", ...
      size: bytes of the whole arrays.
      reach: the reach of the groups.
      gpu: the GPU.

    Returns:
      Seconds; None if the group spans several hosts and their network is unknown.
    """
    count, near = reach.size, reach.near
    if count == 1:
        return 0.0
    if near < count and gpu.network is None:
        return None
    network = gpu.network or 0.0
    if kind == "collective-permute":
        return size / (gpu.link if near == count else network)
    if kind == "all-to-all":  # each device sends an equal part to every other
        return size * ((count - 1) / count / gpu.link if near == count else (count - near) / count / network)
    bandwidth = gpu.link if near == count else min(gpu.link, near * network)
    return _passes(kind, count) * size / bandwidth


def _passes(kind: str, count: int) -> float:
    """The bytes that each device sends in a collective, as a multiple of the bytes of the whole array."""
    if kind == "collective-broadcast":
        return 1.0
    # An all-reduce is a reduce-scatter and an all-gather.
    return (2 if kind == "all-reduce" else 1) * (count - 1) / count


COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of GPUs with a predicted step time."""

OTHER = "other groups"
"""The label of a collective whose groups lie along no product of axes."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A step on some number of GPUs, with the same batch on each GPU.

    Attributes:
      devices: number of GPUs.
      timing: the predicted time.
      efficiency: the time of the kernels alone, as a share of the predicted time.
    """

    devices: int
    timing: StepTime
    efficiency: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of a step.

    Attributes:
      bytes: bytes of whole arrays by collective, dtype and axes: {"all-reduce": {"f32": {"data+fsdp": 1024}}}.
      timing: the predicted time on the planned devices; None if the network between hosts is unknown.
      grows: the axis of the mesh that grows with the number of GPUs.
      scaling: the predicted time by number of GPUs. Empty if the axis has one device, because the program then has no
        collectives along it.
    """

    bytes: Mapping[str, Mapping[str, Mapping[str, int]]]
    timing: StepTime | None
    grows: str
    scaling: Sequence[Scale]


def communication_of(
    events: Sequence[Event], gpu: Gpu, pace: float, *, mesh: Mapping[str, int], devices: int
) -> Communication:
    """Predicts the communication of a program that was compiled for several devices.

    To predict other numbers of GPUs, the groups of the collectives grow along one axis. Kernels and array sizes stay
    the same.

    Args:
      events: the events of the program.
      gpu: the GPU.
      pace: seconds per byte that kernels read or write.
      mesh: the sizes of the mesh as the user gave them. The axis of size -1 grows, or `data`.
      devices: the number of devices that the program was compiled for.
    """
    sizes = settle(mesh, devices)
    grows = next((name for name, size in mesh.items() if size == -1), DATA)
    # A loop starts the same collective several times.
    starts = {event.name: event for event in events if isinstance(event, Start)}
    axes = {name: axes_of(start.instruction, sizes) for name, start in starts.items()}

    def timing(count: int) -> StepTime | None:
        grown = {**sizes, grows: count * sizes[grows] // devices}
        reach = functools.cache(lambda names: reach_of(along(names, grown)))
        durations: dict[str, float] = {}
        for name, start in starts.items():
            names = axes[name]
            near = _as_compiled(start, devices, count) if names is None else reach(names)
            seconds = duration_of(start.kind, start.bytes, near, gpu)
            if seconds is None:
                return None
            durations[name] = seconds
        return simulate(events, pace, lambda start: durations[start.name])

    alone = simulate(events, pace, lambda _: 0.0).step
    counts = sorted({*COUNTS, devices}) if sizes[grows] > 1 else []
    timings = {count: timing(count) for count in counts if count * sizes[grows] % devices == 0}
    return Communication(
        bytes=_bytes(events, axes),
        timing=timing(devices),
        grows=grows,
        scaling=[Scale(count, step_time, alone / step_time.step) for count, step_time in timings.items() if step_time],
    )


def label(axes: Iterable[str] | None) -> str:
    """Names the mesh axes of a collective: "data+fsdp"; "one device" for no axes, and `OTHER` for None."""
    return OTHER if axes is None else "+".join(axes) or "one device"


def _as_compiled(start: Start, devices: int, count: int) -> Reach:
    """The reach of groups that lie along no mesh axes, so that they do not grow with the number of GPUs.

    Args:
      start: the collective.
      devices: the number of devices that the program was compiled for.
      count: the number of planned GPUs; devices numbered `count` or higher are left out.
    """
    groups = (tuple(id for id in group if id < count) for group in groups_of(start.instruction, devices))
    return reach_of(tuple(group for group in groups if group))


def _bytes(events: Iterable[Event], axes: Mapping[str, tuple[str, ...] | None]) -> dict[str, dict[str, dict[str, int]]]:
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for event in events:
        if isinstance(event, Start):
            for dtype, size in event.arrays:
                by_axes = totals.setdefault(event.kind, {}).setdefault(dtype, {})
                name = label(axes[event.name])
                by_axes[name] = by_axes.get(name, 0) + size
    return totals
