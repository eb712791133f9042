"""Builds the training step that a plan compiles: the run's own function, with shapes instead of arrays."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from mpjax.precision.calls import modules_of
from mpjax.training import TrainState
from mpjax.training.mesh import batch_sharding, replicated
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.setup import Task


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step and its abstract inputs.

    Attributes:
      policy: the name of the policy, as the user wrote it.
      plan: the precision plan.
      task: model, precision and objective.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, jitted, with the state donated.
      state: the abstract state.
      batch: the abstract batch, by field.
      accumulate: number of micro-batches per batch.
    """

    policy: str
    plan: PrecisionPlan
    task: Task
    tx: optax.GradientTransformation
    train_step: Any
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    accumulate: int = 1

    @property
    def batch_size(self) -> int:
        """Returns the examples per step, over all devices."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def attention(self) -> bool:
        """Returns True if the model has an attention module."""
        return any("Attention" in type(module).__name__ for module in modules_of(self.task.abstract).values())

    def of(self, batch_size: int) -> "Step":
        """Returns the same step for batches of another size."""
        batch = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in self.batch.items()}
        return dataclasses.replace(self, batch=batch)

    def on(self, mesh: Mesh) -> tuple[TrainState, Any]:
        """Returns the arguments of `train_step.lower`: the replicated abstract state and the sharded abstract batch."""
        split = batch_sharding(mesh, batch_size=self.batch_size, accumulate=self.accumulate)
        return _placed(self.state, replicated(mesh)), _placed(dict(self.batch), split)

    def wide(self) -> contextlib.AbstractContextManager:
        """Returns the context to trace the step in. It enables x64 if the precision plan uses float64."""
        return wide(self.plan)


def wide(plan: PrecisionPlan) -> contextlib.AbstractContextManager:
    """Returns a context that enables x64 if a precision plan uses float64."""
    return jax.enable_x64(jax.config.read("jax_enable_x64") or plan.float64)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
