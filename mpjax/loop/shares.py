"""Which processes of an elastic run can share its batch."""

import math
from collections.abc import Mapping

from mpjax.config.choices import AUTO
from mpjax.config.schema import Config
from mpjax.mesh_axes import BATCH_AXES


def sharing(config: Config, there: Mapping[int, int]) -> tuple[int, ...]:
    """Chooses the largest number of processes, in ascending order, that can train with the batch of `config`.

    Their devices have to fill the mesh and to divide the batch in as many micro-batches as with all processes. The
    micro-batches stay, because augmentation and dropout draw random numbers for each: with others, the same batch would
    give another loss. So each device takes more examples at once.

    Args:
      config: the settings of the run; one size of its mesh is -1.
      there: the number of devices of each process that could train, by its number.

    Returns:
      The numbers of the processes; empty if no number of processes divides the batch.
    """
    pieces = max(1, config.training.accumulate)
    for count in range(len(there), 0, -1):
        members = tuple(sorted(there))[:count]
        shards = _shards(config, sum(there[member] for member in members))
        if shards and config.data.batch_size % (shards * pieces) == 0:
            return members
    return ()


def examples_at_once(config: Config, devices: int) -> int | None:
    """The number of examples that each of so many devices takes at once; None if each start finds it."""
    pieces, shards = config.training.accumulate, _shards(config, devices)
    return None if pieces == AUTO or not shards else config.data.batch_size // (shards * pieces)


def _shards(config: Config, devices: int) -> int:
    """The number of parts that the batch is cut into on so many devices; 0 if they do not fill the mesh."""
    sizes = config.mesh.sizes
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if devices % fixed:
        return 0
    return math.prod(size if size > 0 else devices // fixed for size in (sizes[axis] for axis in BATCH_AXES))
