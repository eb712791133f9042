"""The device mesh of a run, and the transfer of batches to its devices."""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, DATA, FSDP, TENSOR


def make_mesh(
    devices: Sequence | None = None, /, *, data: int = -1, fsdp: int = 1, context: int = 1, tensor: int = 1
) -> Mesh:
    """Creates a mesh with the axes `data`, `fsdp`, `context` and `tensor`; consecutive devices lie in row-major order.

    One size may be -1: it becomes the number of devices divided by the other sizes.

    Args:
      devices: the devices; `jax.devices()` by default.
      data: the number of replicas of the parameters, which are divided over the other axes.
      fsdp: the number of shards of parameters and optimizer state; if it is -1, write a size for `data` too.
      context: the number of shards of the positions of texts, each with shards of its own of parameters and optimizer
        state; if it is -1, write a size for `data` too.
      tensor: the number of shards of attention heads and MLPs; if it is -1, write a size for `data` too.

    Raises:
      UsageError: the product of the sizes is not the number of devices, or two sizes are -1; the message names the
        nearest sizes.
    """
    devices = jax.devices() if devices is None else devices
    sizes = resolve_sizes({DATA: data, FSDP: fsdp, CONTEXT: context, TENSOR: tensor}, len(devices))
    # Auto: the compiler propagates shardings, so models and losses need no annotations.
    return Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def resolve_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Copies the sizes of the axes with -1 replaced, so that their product is the number of devices.

    Raises:
      UsageError: the product of the sizes is not `devices`, two sizes are -1, or a size is 0 or below -1.
    """
    known = math.prod(size for size in sizes.values() if size > 0)
    settled = {name: devices // known if size == -1 else size for name, size in sizes.items()}
    # Not the product alone: two sizes of -2 have a positive product.
    possible = min(settled.values()) > 0 and list(sizes.values()).count(-1) < 2
    if not possible or math.prod(settled.values()) != devices:
        shown, near = (
            " ".join(f"--mesh.{name} {size}" for name, size in choice.items())
            for choice in (sizes, _nearest(sizes, devices))
        )
        raise UsageError(
            f"{shown} does not divide {devices} devices: wanted sizes whose product is the number of devices, and -1 "
            f"for at most one; nearest: {near}"
        )
    return settled


def _nearest(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Finds the sizes with product `devices` and the smallest log ratios to `sizes`; sizes below 1 match any size."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    products = [shape for shape in itertools.product(divisors, repeat=len(sizes)) if math.prod(shape) == devices]

    def distance(shape: tuple[int, ...]) -> float:
        pairs = zip(shape, sizes.values(), strict=True)
        return sum(abs(math.log(size / other)) for size, other in pairs if other > 0)

    return dict(zip(sizes, min(products, key=distance), strict=True))


def put_on_devices(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Copies a batch to the devices of `sharding`.

    If devices belong to other processes too, each process passes only its own examples, and the results are global
    arrays.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(dict(batch), sharding)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}
