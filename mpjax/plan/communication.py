"""Predicts the communication of a step: bytes by mesh axis, seconds per link, and scaling to more GPUs.

Devices are numbered from 0 as in the mesh: row by row, neighbours along the last axis.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpjax.mesh_axes import DATA
from mpjax.plan.devices import Gpu
from mpjax.plan.expectation import Expected, expected_of
from mpjax.plan.hlo import Instruction
from mpjax.plan.links import Groups, Reach, Sent, duration_of, reach_of, sent_of
from mpjax.plan.timeline import Event, Start, StepTime, simulate
from mpjax.training.mesh import resolve_sizes


_LISTED = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\}[, ]*)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def groups_of(instruction: Instruction, devices: int) -> Groups:
    """Parses the groups of devices that exchange with each other in a collective, as tuples of device numbers from 0.

    The groups of a collective-permute are its pairs of source and target. `devices` is the number of all devices.

    XLA writes three forms: lists, `[4,2]<=[2,4]T(1,0)` (rows of the numbers 0 to 7 in that shape, transposed) and
    `mesh['x'=2,'y'=4] {'x'}` (groups along some axes of a mesh). Without groups, all devices form one group. A program
    of one replica may name only that replica and mean all its partitions.

    Raises:
      ValueError: the instruction has groups in another form.
    """
    text = instruction.attributes
    if match := _LISTED.search(text):
        groups = tuple(_numbers(group) for group in re.findall(r"\{([\d, ]*)\}", match[1]))
    elif match := _IOTA.search(text):
        groups = _rows(_ordered(match[2], match[3]).reshape(_numbers(match[1])))
    elif match := _MESH.search(text):
        groups = _along_mesh(match[1], match[2] or "", match[3])
    elif "replica_groups=" in text:
        raise ValueError(f"unknown form of replica groups in {text[:200]!r}")
    else:
        groups = ()
    replicas = groups == ((0,),) and "channel_id=" in text and "use_global_device_ids=true" not in text
    return (tuple(range(devices)),) if replicas or not groups else groups


def along(axes: Iterable[str], sizes: Mapping[str, int]) -> Groups:
    """The groups of devices that differ only in their positions along some axes of a mesh, as device numbers from 0.

    Without axes, each device is a group.

    >>> along(["fsdp"], {"data": 2, "fsdp": 2})
    ((0, 1), (2, 3))

    Args:
      axes: names of axes.
      sizes: the size of each axis of the mesh, in order.
    """
    chosen = [index for index, name in enumerate(sizes) if name in set(axes)]
    return _lines(np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())), chosen)


def axes_of(instruction: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which a collective exchanges; an empty tuple for groups of one device each.

    The axes of a collective-permute are the axes along which any pair differs.

    Args:
      instruction: the collective.
      sizes: the size of each axis of the mesh, in order.

    Returns:
      The axes in the order of the mesh, without axes of size 1; None if the groups are not the groups along any choice
      of axes.
    """
    groups = groups_of(instruction, math.prod(sizes.values()))
    long = [name for name, size in sizes.items() if size > 1]
    if instruction.opcode.startswith("collective-permute"):
        places = np.asarray(np.unravel_index(np.asarray(groups), tuple(sizes.values())))  # axis, pair, end
        moved = (places[:, :, 0] != places[:, :, 1]).any(axis=1)
        return tuple(name for name, differs in zip(sizes, moved, strict=True) if differs)
    expected = {frozenset(group) for group in groups}
    for count in range(len(long) + 1):
        for axes in itertools.combinations(long, count):
            if {frozenset(group) for group in along(axes, sizes)} == expected:
                return axes
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.tolist())


def _lines(table: np.ndarray, axes: Sequence[int]) -> Groups:
    """Groups the entries of an array that differ only in their positions along the axes with these indices."""
    others = [axis for axis in range(table.ndim) if axis not in axes]
    return _rows(table.transpose(*others, *axes).reshape(-1, math.prod(table.shape[axis] for axis in axes)))


def _ordered(shape: str, order: str | None) -> np.ndarray:
    """Numbers the elements of an array from 0 in row-major order, and then transposes its axes.

    The shape "2,4" and the order "1,0" yield an array of shape (4, 2). With the order None, the axes stay as they are.
    """
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return numbers.transpose(_numbers(order)) if order else numbers


def _along_mesh(mesh: str, devices: str, axes: str) -> Groups:
    """Builds the groups from the parts of XLA's form `mesh[...]`.

    Args:
      mesh: the sizes of the axes: `'x'=2,'y'=4`.
      devices: the order of the devices: their numbers, or `[2,4]T(1,0)` as in `_ordered`; empty for 0, 1, 2 and so on.
      axes: the axes along which devices exchange: `'x'`, or `'y':(1)2` for the first factor of an axis y of size 4 that
        is split into 2 x 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    split: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in _AXIS.findall(axes):
        split.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    shape, chosen = [], []
    for name, size in sizes.items():
        done = 1
        for before, extent in sorted(split.get(name, [])):
            shape += [before // done, extent]
            chosen.append(len(shape) - 1)
            done = before * extent
        shape.append(size // done)
    if match := _ORDER.fullmatch(devices):
        numbers = _ordered(match[1], match[2])
    else:
        numbers = np.asarray(_numbers(devices) or range(math.prod(sizes.values())))
    return _lines(numbers.reshape(shape), chosen)


COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of GPUs with a predicted step time."""

OTHER = "other groups"
"""The label of a collective whose groups are not the groups along any choice of mesh axes."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A step on some number of GPUs, with the same batch on each GPU.

    Attributes:
      devices: number of GPUs.
      timing: the predicted time.
      efficiency: the time of the kernels without communication, as a fraction of the predicted time.
    """

    devices: int
    timing: StepTime
    efficiency: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """The communication of a step.

    Attributes:
      bytes: bytes of whole arrays in one step, by collective, dtype (XLA's name) and axes:
        {"all-reduce": {"f32": {"data+fsdp": 1024}}}.
      timing: the predicted time on the planned devices; None if the network between hosts is unknown.
      grows: the axis of the mesh that grows with the number of GPUs.
      scaling: the predicted times for the numbers of GPUs in `COUNTS` and the planned number, in ascending order.
        Numbers that the other axes of the mesh do not divide are left out, and numbers for which the network is
        unknown. Empty if the axis `grows` has one device, because the program then has no collectives along it.
      sent: the bytes that each GPU sends in one step, by link; None if not computed.
      expected: the time to expect on the planned devices; None if not computed, or the network is unknown.
    """

    bytes: Mapping[str, Mapping[str, Mapping[str, int]]]
    timing: StepTime | None
    grows: str
    scaling: Sequence[Scale]
    sent: Sent | None = None
    expected: Expected | None = None


def communication_of(
    events: Sequence[Event],
    gpu: Gpu,
    pace: float,
    *,
    mesh: Mapping[str, int],
    devices: int,
    expected_pace: float | None = None,
) -> Communication:
    """Predicts the communication of a program that was compiled for several devices.

    To predict other numbers of GPUs, the groups of the collectives grow along one axis. Kernels and array sizes stay
    the same, as does the batch on each GPU.

    Args:
      events: the events of the program.
      gpu: the GPU.
      pace: seconds per byte that kernels read or write.
      mesh: the sizes of the mesh by axis, as the user gave them. The axis of size -1 grows or, without one, `data`.
      devices: the number of devices that the program was compiled for.
      expected_pace: the seconds to expect per byte that kernels read or write; None: `expected` is not computed.
    """
    sizes = resolve_sizes(mesh, devices)
    grows = next((name for name, size in mesh.items() if size == -1), DATA)
    # A loop starts the same collective several times.
    starts = {event.name: event for event in events if isinstance(event, Start)}
    axes = {name: axes_of(start.instruction, sizes) for name, start in starts.items()}

    def reaches(count: int) -> dict[str, Reach]:
        grown = {**sizes, grows: count * sizes[grows] // devices}
        along_axes = functools.cache(lambda names: reach_of(along(names, grown)))
        return {
            name: _as_compiled(start, devices, count) if (names := axes[name]) is None else along_axes(names)
            for name, start in starts.items()
        }

    def timing(count: int) -> StepTime | None:
        reach = reaches(count)
        durations = {name: duration_of(start.kind, start.bytes, reach[name], gpu) for name, start in starts.items()}
        if None in durations.values():
            return None
        return simulate(events, pace, lambda start: durations[start.name] or 0.0)

    alone = simulate(events, pace, lambda _: 0.0).step
    counts = sorted({*COUNTS, devices}) if sizes[grows] > 1 else []
    timings = {count: timing(count) for count in counts if count * sizes[grows] % devices == 0}
    reach, labels = reaches(devices), {name: label(names) for name, names in axes.items()}
    sent = [sent_of(event.kind, event.bytes, reach[event.name]) for event in events if isinstance(event, Start)]
    return Communication(
        bytes=_bytes(events, axes),
        timing=timing(devices),
        grows=grows,
        scaling=[Scale(count, step_time, alone / step_time.step) for count, step_time in timings.items() if step_time],
        sent=Sent(sum(each.within for each in sent), sum(each.between for each in sent)),
        expected=None if expected_pace is None else expected_of(events, gpu, expected_pace, reach, labels),
    )


def label(axes: Iterable[str] | None) -> str:
    """Names the mesh axes of a collective: "data+fsdp"; "one device" for no axes, and `OTHER` for None."""
    return OTHER if axes is None else "+".join(axes) or "one device"


def _as_compiled(start: Start, devices: int, count: int) -> Reach:
    """The reach of the groups of a collective as compiled for `devices` devices, for a prediction on `count` devices.

    It is for groups that are not along mesh axes, so that they do not grow. Devices numbered `count` or higher are left
    out.
    """
    groups = (tuple(id for id in group if id < count) for group in groups_of(start.instruction, devices))
    return reach_of(tuple(group for group in groups if group))


def _bytes(events: Iterable[Event], axes: Mapping[str, tuple[str, ...] | None]) -> dict[str, dict[str, dict[str, int]]]:
    """Adds up the bytes of collectives for `Communication.bytes`; `axes` has the axes of each `Start`, by name."""
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for event in events:
        if isinstance(event, Start):
            for dtype, size in event.arrays:
                by_axes = totals.setdefault(event.kind, {}).setdefault(dtype, {})
                name = label(axes[event.name])
                by_axes[name] = by_axes.get(name, 0) + size
    return totals
