"""Which processes of an elastic run can share its batch, and in how many micro-batches."""

import dataclasses
import math
from collections.abc import Mapping

from mpjax.config.choices import AUTO
from mpjax.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Share:
    """The processes that train, and how they cut the batch.

    Attributes:
      members: the numbers of the processes, ascending.
      accumulate: the number of micro-batches; `AUTO` if each start finds it.
    """

    members: tuple[int, ...]
    accumulate: int


def share_of(config: Config, there: Mapping[int, int], before: Mapping[int, int]) -> Share | None:
    """Chooses the largest number of processes, in ascending order, that can train with the batch of `config`.

    Their devices have to fill the mesh and to divide the batch. It stays as large as it is, and no device takes more
    examples at once than with all processes, so that what fitted into its memory fits again: micro-batches are added.

    Args:
      config: the settings of the run; one size of its mesh is -1.
      there: the number of devices of each process that could train, by its number.
      before: the same for all processes of the run.

    Returns:
      The choice; None if no number of processes divides the batch.
    """
    for count in range(len(there), 0, -1):
        members = tuple(sorted(there))[:count]
        shards = _shards(config, sum(there[member] for member in members))
        if not shards:
            continue
        batch, accumulate = config.data.batch_size, config.training.accumulate
        if accumulate == AUTO:
            if batch % shards == 0:
                return Share(members, AUTO)
            continue
        most = batch // (_shards(config, sum(before.values())) * accumulate)  # examples of a device at once
        for pieces in range(1, batch // shards + 1):
            if batch % (shards * pieces) == 0 and batch // (shards * pieces) <= most:
                return Share(members, pieces)
    return None


def _shards(config: Config, devices: int) -> int:
    """The number of parts that the batch is cut into on so many devices; 0 if they do not fill the mesh."""
    sizes = config.mesh.sizes
    fixed = math.prod(size for size in sizes.values() if size > 0)
    return 0 if devices % fixed else devices // (sizes["tensor"] if sizes["tensor"] > 0 else devices // fixed)
