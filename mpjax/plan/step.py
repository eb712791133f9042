"""Builds the training step that a plan compiles: the run's own function, with shapes instead of arrays."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from mpjax.config import Config, Duration
from mpjax.config.limits import check
from mpjax.data import Fields
from mpjax.plan.shapes import batch_shapes
from mpjax.precision.calls import modules_of
from mpjax.training import TrainState
from mpjax.training.mesh import batch_sharding, replicated
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.setup import Task, make_state, make_step


EPOCH = 1000
"""Steps per epoch, to convert durations given in epochs. Schedules change constants of the program, not its cost."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step and its abstract inputs.

    Attributes:
      plan: the precision plan.
      task: model, precision and objective.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, jitted, with the state donated.
      state: the abstract state.
      batch: the abstract batch, by field.
      accumulate: number of micro-batches per batch.
    """

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
        return _wide(self.plan)


def planned_step(config: Config, fields: Fields) -> Step:
    """Builds the step of a run on batches of these fields.

    Raises:
      UsageError: the settings are invalid, or the model does not accept such batches.
    """
    check(config)
    plan = plan_precision(config.precision)
    with _wide(plan):
        return _planned(config, plan, fields)


def _planned(config: Config, plan: PrecisionPlan, fields: Fields) -> Step:
    def steps(duration: Duration) -> int:
        return duration.in_steps(config.data.batch_size, EPOCH)

    warmup = steps(config.optimizer.warmup)
    task, tx, train_step = make_step(config, plan, fields, steps=steps(config.steps), warmup=warmup)

    make = functools.partial(make_state, task, tx, ema=config.training.ema > 0)
    state = jax.eval_shape(make, jax.random.key(config.seed), {})
    return Step(
        plan, task, tx, train_step, state, batch_shapes(fields, config.data.batch_size), config.training.accumulate
    )


def _wide(plan: PrecisionPlan) -> contextlib.AbstractContextManager:
    return jax.enable_x64(jax.config.read("jax_enable_x64") or plan.float64)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
