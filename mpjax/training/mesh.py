"""The device mesh and its shardings: state is replicated, batches are sharded."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mpjax.errors import UsageError


def data_mesh() -> Mesh:
    """Returns a mesh of all devices with the single axis `data`."""
    # Auto: the compiler propagates shardings, so that models and losses need no annotations.
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the fully replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, batch_size: int, accumulate: int = 1) -> NamedSharding:
    """Returns the sharding of arrays [B, ...] with examples divided among the devices.

    Raises:
      UsageError: the batch does not divide evenly among devices and micro-batches.
    """
    parts = mesh.size * accumulate
    if batch_size % parts:
        raise UsageError(
            f"a batch of {batch_size} examples does not divide among {mesh.size} devices x {accumulate} micro-batches: "
            f"take a multiple of {parts}, such as {max(1, batch_size // parts) * parts}"
        )
    return NamedSharding(mesh, PartitionSpec("data"))


def evaluation_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Returns the sharding of evaluation batches: sharded if they divide evenly among the devices, else replicated."""
    return NamedSharding(mesh, PartitionSpec("data" if batch_size % mesh.size == 0 else None))


def place(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Puts a batch on the devices; with several processes, each passes its own rows."""
    if sharding.is_fully_addressable:
        return jax.device_put(dict(batch), sharding)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
