"""How long a collective takes on the links between GPUs, and how many bytes each GPU sends over them."""

import collections
import dataclasses

from mpjax.plan.devices import HOST, Gpu


Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that exchange with each other, by device number from 0."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """How the devices of a group are distributed over hosts.

    Attributes:
      size: number of devices of the group.
      near: the fewest devices of the group on one of its hosts; equal to `size` on a single host.
    """

    size: int
    near: int


def reach_of(groups: Groups) -> Reach:
    """The reach of the group that is taken as the slowest: with the smallest `near / size`, and of equals the largest.

    Devices are placed in order: the first `HOST` devices are on the first host.
    """
    reaches = [Reach(len(group), min(collections.Counter(id // HOST for id in group).values())) for group in groups]
    return min(reaches, key=lambda reach: (reach.near / reach.size, -reach.size))


def duration_of(kind: str, size: int, reach: Reach, gpu: Gpu) -> float | None:
    """Predicts the seconds of a collective.

    A ring through several hosts enters and leaves each host by the network adapters of all its members there. NCCL adds
    up their bandwidth (NVIDIA/nccl, issue 412). All groups exchange at once, so each GPU has only `gpu.network`.

    Args:
      kind: "all-reduce", "all-gather", ...
      size: bytes of the whole arrays, before a reduce-scatter or after an all-gather.
      reach: how the devices of a group are distributed over hosts.
      gpu: the GPU.

    Returns:
      Seconds, 0 for a group of one device; None if the group spans several hosts and their network is unknown.
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
    return passes(kind, count) * size / bandwidth


def passes(kind: str, count: int) -> float:
    """The bytes that each of `count` devices sends in a collective, as a multiple of the bytes of the whole array."""
    if kind == "collective-broadcast":
        return 1.0
    # An all-reduce is a reduce-scatter and an all-gather.
    return (2 if kind == "all-reduce" else 1) * (count - 1) / count


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that each GPU sends.

    Attributes:
      within: over the links of its host: NVLink, or PCIe on GPUs without.
      between: through its network adapter, to other hosts.
    """

    within: int
    between: int


def sent_of(kind: str, size: int, reach: Reach) -> Sent:
    """Counts the bytes that each GPU sends in a collective, as the algorithm of `duration_of` distributes them.

    With `near` members on each host, a ring through several hosts is `near` rings, each with a part of the array. Each
    member sends one of these parts to the next host, and the other parts to members on its own host.

    Args:
      kind: "all-reduce", "all-gather", ...
      size: bytes of the whole arrays, as in `duration_of`.
      reach: how the devices of a group are distributed over hosts.
    """
    count, near = reach.size, reach.near
    if count == 1:
        return Sent(0, 0)
    if kind == "collective-permute":
        return Sent(size, 0) if near == count else Sent(0, size)
    if kind == "all-to-all":
        return Sent(round(size * (near - 1) / count), round(size * (count - near) / count))
    total = passes(kind, count) * size
    between = 0.0 if near == count else total / near
    return Sent(round(total - between), round(between))


START = 8.4e-6
"""Seconds that a collective takes however few bytes it has, on two GPUs that are infinitely near."""

HOP = 3.4e-6
"""Seconds from a GPU to the next one in a ring within a host."""

TREE_HOP = 4e-6
"""Seconds from a GPU to the next one in a tree within a host."""

HOST_HOP = 14e-6
"""Seconds from a GPU to the next one in a ring or tree on another host."""


def latency_of(kind: str, reach: Reach) -> float:
    """Predicts the seconds of a collective that do not depend on its bytes.

    It is NCCL's own prediction, from which it chooses its algorithm: rings, and for an all-reduce the faster of ring
    and tree, with the protocol Simple (NVIDIA/nccl, src/graph/tuning.cc, of which `START` and the hops are constants).
    On 8 H100 in a host, NVIDIA measured 124 us for an all-reduce of 16.8 MB and 325 us for 67 MB
    (NVIDIA/dgxc-benchmarking, nccl/README.md). This latency and `duration_of` add up to 121 and 317. Collectives below
    4 MB take about half of the prediction, because NCCL has other protocols for them.

    Args:
      kind: "all-reduce", "all-gather", ...
      reach: how the devices of a group are distributed over hosts.

    Returns:
      Seconds, 0 for a group of one device.
    """
    count, near = reach.size, reach.near
    if count == 1:
        return 0.0
    hosts = -(-count // near)
    if kind in ("collective-permute", "all-to-all"):  # every pair at once
        return START + (HOP if hosts == 1 else HOST_HOP)
    twice = 2 if kind == "all-reduce" else 1
    steps = twice * (count - 1)
    between = hosts - 1 if kind != "all-reduce" else 2 * hosts if hosts > 1 else 0
    ring = START + max(steps - between, 0) * HOP + between * HOST_HOP
    if kind != "all-reduce":
        return ring
    tree = START + 2 * ((near - 1) * TREE_HOP + (hosts.bit_length() - 1) * HOST_HOP)
    return min(ring, tree)
