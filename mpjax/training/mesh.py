"""Devices and shardings: the state whole on every device, the batch cut across them."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mpjax.errors import UsageError


def data_mesh() -> Mesh:
    """All devices in one axis, `data`."""
    # Auto: the compiler propagates shardings, so that models and losses need not speak of them.
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, batch_size: int, accumulate: int = 1) -> NamedSharding:
    """Of arrays [B, ...] whose examples are divided among the devices.

    Raises:
      UsageError: a batch that does not divide evenly among devices and micro-batches.
    """
    parts = mesh.size * accumulate
    if batch_size % parts:
        raise UsageError(
            f"a batch of {batch_size} examples does not divide among {mesh.size} devices x {accumulate} micro-batches: "
            f"take a multiple of {parts}, such as {max(1, batch_size // parts) * parts}"
        )
    return NamedSharding(mesh, PartitionSpec("data"))


def evaluation_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
    """Of evaluation batches: divided among the devices where that is even, else whole on each."""
    return NamedSharding(mesh, PartitionSpec("data" if batch_size % mesh.size == 0 else None))


def place(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """A host's batch on its devices; of several processes each has its own rows of it."""
    if sharding.is_fully_addressable:
        return jax.device_put(dict(batch), sharding)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
