"""The division of batches, parameters and optimizer state over a mesh of devices."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpjax.errors import UsageError
from mpjax.mesh_axes import BATCH_AXES, DATA, FSDP, LOSS_AXES, PARAMETER_AXES, TENSOR
from mpjax.precision.dtypes import FLOAT32


SMALL = 2**14
"""Parameters with fewer elements are not divided over `fsdp`: a gather costs more than the memory that it saves."""

BatchNorm = Literal["device", "global"]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The division of a run's arrays over a mesh with the axes `data`, `fsdp`, `context` and `tensor`.

    Attributes:
      mesh: all devices.
      divided: the spec of each divided parameter, by path; the others are replicated.
      travels: the dtype to which a parameter is cast before it is gathered over `fsdp` and `context`, by path; absent:
        its own.
      given: the dtype of a gathered parameter in the model, by path: that of `travels` if all that the model does with
        the parameter is to cast it to that dtype, else its own; absent: its own.
      blocks: paths of the modules that gather their parameters at each call, and again in the backward pass.
      reduce_dtype: the dtype in which gradients are added across devices.
      batch_norm: the examples over which batch norms compute mean and variance: "device" for each device's own,
        "global" for the examples of all devices.
      sequence: whether the values between blocks are divided along the sequence over `tensor`.
      context: whether the positions of texts are divided over `context`; without it, all its devices compute the same.
      fixed: paths of statistics that no step changes.
    """

    mesh: Mesh
    _: dataclasses.KW_ONLY
    divided: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    travels: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    given: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    reduce_dtype: np.dtype = FLOAT32
    batch_norm: BatchNorm = "device"
    sequence: bool = False
    context: bool = False
    fixed: Collection[str] = ()

    @property
    def shares(self) -> int:
        """The number of shards of a batch: the size of the axis `data` times the size of the axis `fsdp`."""
        return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

    @property
    def terms(self) -> int:
        """The number of terms that the loss of a batch has: one for each shard, or for each part of its positions."""
        return math.prod(self.mesh.shape[axis] for axis in LOSS_AXES)

    def spec(self, name: str) -> PartitionSpec:
        """The partition spec of the parameter at path `name`; empty if it is replicated."""
        return self.divided.get(name, PartitionSpec())

    def fsdp_axis(self, name: str) -> int | None:
        """The axis along which the parameter at path `name` is divided over `fsdp` or `context`; None if it is not."""
        return next((axis for axis, over in enumerate(self.spec(name)) if _gathered(over)), None)

    def gathered_over(self, name: str) -> tuple[str, ...]:
        """The mesh axes over which a block gathers the parameter at path `name`: `fsdp`, `context`, both or none."""
        return next((axes for over in self.spec(name) if (axes := _gathered(over))), ())

    def of_rows(self, stack: str) -> "Layout":
        """Copies the layout, and removes the leading axis (of blocks) from the specs of a stack of blocks.

        The copy fits a single block inside the loop over the stack. The paths of the arrays do not change.

        Args:
          stack: the path of the stacked block, as in `blocks/all`.
        """
        rows = {name: PartitionSpec(*spec[1:]) for name, spec in self.divided.items() if name.startswith(f"{stack}/")}
        return dataclasses.replace(self, divided={**self.divided, **rows})

    @property
    def replicated(self) -> NamedSharding:
        """The fully replicated sharding."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, *, size: int, accumulate: int = 1) -> NamedSharding:
        """The sharding of training batches, arrays [B, ...]: the first axis is divided over `data` and `fsdp`.

        Args:
          size: the number of examples in the batch of all devices.
          accumulate: the number of micro-batches that a batch is cut into.

        Raises:
          UsageError: `size` is no multiple of `shares` times `accumulate`.
        """
        divisor = self.shares * accumulate
        if size % divisor:
            raise UsageError(
                f"a batch of {size} examples does not divide among {self.shares} devices x {accumulate} micro-batches: "
                f"take a multiple of {divisor}, such as {max(1, size // divisor) * divisor}"
            )
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def evaluation(self, size: int) -> NamedSharding:
        """The sharding of an evaluation batch: as in `batch` if its `size` examples divide evenly, else replicated."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES) if self.divides(size) else PartitionSpec())

    def divides(self, size: int) -> bool:
        """True if a batch of `size` examples divides evenly over the mesh axes `data` and `fsdp`."""
        return size % self.shares == 0

    def state(self, state: Any) -> Any:
        """Chooses the sharding of each leaf of a training state, as a pytree of the same structure.

        Moments, master weights and moving averages are divided like their parameter: the leaves under its path that
        have its shape. The values of a float8 moment are too, and its scales where the mesh divides their shape evenly.
        All other leaves are replicated.

        Args:
          state: a `TrainState` of arrays or of shapes.
        """
        shapes = {name: param.shape for name, param in state.params.items()}

        def sharding(path: tuple, leaf) -> NamedSharding:
            *_, parent, last = (None, None, *path)
            name = str(getattr(last, "key", getattr(parent, "key", "")))
            of_moment = not hasattr(last, "key") and self._divides(self.spec(name), leaf.shape)
            follows = of_moment or shapes.get(name) == leaf.shape
            return NamedSharding(self.mesh, self.spec(name)) if follows else self.replicated

        return jax.tree_util.tree_map_with_path(sharding, state)

    def _divides(self, spec: PartitionSpec, shape: tuple[int, ...]) -> bool:
        divisors = [_size(self.mesh, over) for over in spec]
        return len(divisors) == len(shape) and all(
            size % divisor == 0 for size, divisor in zip(shape, divisors, strict=True)
        )


def over(axes: Sequence[str], spec: PartitionSpec) -> PartitionSpec:
    """Keeps the entries of a partition spec whose mesh axes are all among `axes`; the others become None."""

    def is_over(names: Any) -> bool:
        return names is not None and set(axes).issuperset(_names(names))

    return PartitionSpec(*(names if is_over(names) else None for names in spec))


def divide(
    params: Mapping[str, Any],
    mesh: Mesh,
    tensor_axes: Mapping[str, int] = MappingProxyType({}),
    stacked: Collection[str] = (),
) -> dict[str, PartitionSpec]:
    """Chooses the partition specs, by path, of the parameters to divide over `fsdp` and `context`, and over `tensor`.

    Over `fsdp` and `context` together, a parameter is divided along its longest axis that is not divided over `tensor`
    and whose length is a multiple of their size, unless it has fewer than `SMALL` elements. Parameters that are not
    divided at all are left out. An array of stacked blocks is gathered block by block: its leading axis is never
    divided, and does not count towards `SMALL`.

    Args:
      params: arrays or shapes by path.
      mesh: the mesh.
      tensor_axes: the index of the axis to divide over `tensor`, by path.
      stacked: the paths of the arrays of stacked blocks, whose leading axis counts the blocks.
    """
    size = _size(mesh, PARAMETER_AXES)
    specs = {}
    for name, param in params.items():
        axes: list[str | tuple[str, ...] | None] = [None] * len(param.shape)
        if name in tensor_axes and mesh.shape[TENSOR] > 1:
            axes[tensor_axes[name]] = TENSOR
        leading = int(name in stacked)
        free = [axis for axis in range(leading, len(axes)) if axes[axis] is None and param.shape[axis] % size == 0]
        if size > 1 and free and np.prod(param.shape[leading:]) >= SMALL:
            first, *others = (axis for axis in PARAMETER_AXES if mesh.shape[axis] > 1)
            axes[max(free, key=lambda axis: param.shape[axis])] = (first, *others) if others else first
        if any(axes):
            specs[name] = PartitionSpec(*axes)
    return specs


def _gathered(over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return tuple(axis for axis in _names(over) if axis in PARAMETER_AXES)


def _size(mesh: Mesh, over: str | tuple[str, ...] | None) -> int:
    """The number of parts into which an entry of a partition spec divides an axis."""
    return math.prod(mesh.shape[axis] for axis in _names(over))


def _names(over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (over,) if isinstance(over, str) else over or ()
