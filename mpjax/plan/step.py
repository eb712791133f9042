"""Builds the training step that a plan compiles: the run's own function, with shapes instead of arrays."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from mpjax.config.plan import xla_options
from mpjax.precision.calls import modules_of
from mpjax.training import TrainState
from mpjax.training.mesh import compiler_options
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.setup import Placed, Task


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A training step and its abstract inputs.

    Attributes:
      policy: the name of the policy, as the user wrote it.
      plan: the precision plan.
      task: model, precision and objective.
      tx: the optimizer.
      place: builds the training step for a mesh.
      state: the abstract state, by path.
      batch: the abstract batch, by field.
      accumulate: number of micro-batches per batch.
      sizes: the sizes of the mesh by axis, of which one may be -1.
      overlap: True to compile with the options that let GPUs compute while they communicate.
      xla: further options of XLA, as the user wrote them.
    """

    policy: str
    plan: PrecisionPlan
    task: Task
    tx: optax.GradientTransformation
    place: Callable[[Mesh], Placed]
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    accumulate: int = 1
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overlap: bool = True
    xla: str = ""

    @property
    def batch_size(self) -> int:
        """The examples per step, over all devices."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def attention(self) -> bool:
        """True if the model has an attention module."""
        return any("Attention" in type(module).__name__ for module in modules_of(self.task.abstract).values())

    def compiler_options(self, mesh: Mesh) -> dict[str, Any]:
        """XLA's options for the step on a mesh: those of a run, overwritten by the user's own."""
        return compiler_options(mesh, overlap=self.overlap) | xla_options(self.xla)

    def of(self, batch_size: int) -> "PlannedStep":
        """The same step for batches of another size."""
        batch = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in self.batch.items()}
        return dataclasses.replace(self, batch=batch)

    def on(self, mesh: Mesh) -> tuple[jax.stages.Wrapped, tuple[TrainState, Any]]:
        """Builds the training step on a mesh, and its abstract arguments with the layout's shardings."""
        layout, packing, train_step = self.place(mesh)
        split = layout.batch(size=self.batch_size, accumulate=self.accumulate)
        batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for name, x in self.batch.items()}
        packed = jax.eval_shape(packing.pack, self.state)
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), packed, layout.state(packed)
        )
        return train_step, (state, batch)

    def wide(self) -> contextlib.AbstractContextManager:
        """The context to trace the step in. It enables x64 if the precision plan uses float64."""
        return wide(self.plan)


def wide(plan: PrecisionPlan) -> contextlib.AbstractContextManager:
    """A context that enables x64 if a precision plan uses float64."""
    return jax.enable_x64(jax.config.read("jax_enable_x64") or plan.float64)
