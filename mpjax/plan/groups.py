"""Reads the devices that take part in a collective, and the mesh axes along which they lie.

Devices are numbered as in the mesh: row by row, neighbours along the last axis.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpjax.plan.hlo import Instruction


Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"\b(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\}[, ]*)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def groups_of(each: Instruction, devices: int) -> Groups:
    """Parses the groups of devices that exchange with each other; for a collective-permute, its pairs.

    XLA writes three forms: lists, `[4,2]<=[2,4]T(1,0)` (rows of the numbers 0 to 7 in that shape, transposed) and
    `mesh['x'=2,'y'=4] {'x'}` (groups along some axes of a mesh). Without groups, all devices form one group. A program
    of one replica may name only that replica and mean all its partitions.

    Raises:
      ValueError: the instruction has groups in another form.
    """
    text = each.attributes
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
    """The groups of devices that differ only in their positions along some axes of a mesh.

    >>> along(["fsdp"], {"data": 2, "fsdp": 2})
    ((0, 1), (2, 3))

    Args:
      axes: names of axes.
      sizes: the size of each axis of the mesh, in order.
    """
    chosen = [place for place, name in enumerate(sizes) if name in set(axes)]
    return _lines(np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())), chosen)


def axes_of(each: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which a collective exchanges; an empty tuple for groups of one device each.

    The axes of a collective-permute are those along which any pair differs.

    Args:
      each: the collective.
      sizes: the size of each axis of the mesh, in order.

    Returns:
      The axes in the order of the mesh, without axes of size 1; None if the groups lie along no product of axes.
    """
    groups = groups_of(each, math.prod(sizes.values()))
    long = [name for name, size in sizes.items() if size > 1]
    if each.opcode.startswith("collective-permute"):
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
    """Groups the entries of an array that differ only in their positions along some axes."""
    others = [axis for axis in range(table.ndim) if axis not in axes]
    return _rows(table.transpose(*others, *axes).reshape(-1, math.prod(table.shape[axis] for axis in axes)))


def _ordered(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in an array, with its axes transposed: shape "2,4" and order "1,0" yield shape (4, 2)."""
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return numbers.transpose(_numbers(order)) if order else numbers


def _along_mesh(mesh: str, devices: str, axes: str) -> Groups:
    """Builds the groups from the parts of XLA's form `mesh[...]`.

    Args:
      mesh: the sizes of the axes: `'x'=2,'y'=4`.
      devices: the order of the devices: their numbers, or `[2,4]T(1,0)` as in `_ordered`; empty for 0, 1, 2 and so on.
      axes: the axes along which devices exchange: `'x'`, or `'y':(1)2` for the first of the parts 2 x 2 of y.
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
