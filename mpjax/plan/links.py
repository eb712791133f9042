"""Models how long a collective takes on the links between GPUs.

The formulas are those of nccl-tests' bus bandwidth (doc/PERFORMANCE.md): what each device has to send or receive, over
its bandwidth. The ring algorithms of Thakur, Rabenseifner and Gropp, 2005 (https://doi.org/10.1177/1094342005051521)
take that long. Latency is left out: it depends on the algorithm that NCCL chooses, and matters for small arrays.
"""

import collections
import dataclasses

from mpjax.plan.devices import HOST, Gpu
from mpjax.plan.groups import Groups


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far apart the devices of a group are.

    Attributes:
      size: number of devices.
      near: number of them on one host; `size` if all are.
    """

    size: int
    near: int


def reach_of(groups: Groups) -> Reach:
    """Returns the reach of the group that is spread most, by the fewest devices that it has on a host.

    Devices are placed in order: the first `HOST` are on the first host.
    """
    reaches = [Reach(len(group), min(collections.Counter(id // HOST for id in group).values())) for group in groups]
    return min(reaches, key=lambda reach: (reach.near / reach.size, -reach.size))


def duration_of(kind: str, size: int, reach: Reach, gpu: Gpu) -> float | None:
    """Returns the seconds that a collective takes.

    A ring through several hosts enters and leaves each by the network adapters of all its members there: NCCL adds up
    their bandwidth (NVIDIA/nccl, issue 412). All groups exchange at once, so each GPU has only its part of the network.

    Args:
      kind: "all-reduce", "all-gather", ...
      size: bytes of the whole arrays.
      reach: the reach of the groups.
      gpu: the GPU.

    Returns:
      Seconds; None if the group is on several hosts and the network between them is not known.
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
    """Returns how often the bytes of the whole array pass each device."""
    if kind == "collective-broadcast":
        return 1.0
    # An all-reduce is a reduce-scatter and an all-gather.
    return (2 if kind == "all-reduce" else 1) * (count - 1) / count
