"""The training step of a run as it is compiled for a plan: the run's own function, and shapes instead of arrays."""

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
"""Steps of an epoch, where a duration in epochs has to become a number: schedules change constants, not costs."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, and what it is given.

    Attributes:
      plan: the precision decision.
      task: model, precision, objective.
      tx: the optimizer.
      train_step: `(state, batch) -> (state, metrics)`, jitted, the state donated.
      state: the state, without values.
      batch: a batch by field, without values.
      accumulate: micro-batches that it is cut into.
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
        """Examples, over all devices."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def attention(self) -> bool:
        """Whether the model has any."""
        return any("Attention" in type(module).__name__ for module in modules_of(self.task.abstract).values())

    def of(self, batch_size: int) -> "Step":
        """The same step on batches of another size."""
        batch = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in self.batch.items()}
        return dataclasses.replace(self, batch=batch)

    def on(self, mesh: Mesh) -> tuple[TrainState, Any]:
        """State and batch as `train_step.lower` takes them: the state whole on every device, the batch divided."""
        split = batch_sharding(mesh, batch_size=self.batch_size, accumulate=self.accumulate)
        return _placed(self.state, replicated(mesh)), _placed(dict(self.batch), split)

    def wide(self) -> contextlib.AbstractContextManager:
        """What a step with float64 in it is traced under."""
        return _wide(self.plan)


def planned_step(config: Config, fields: Fields) -> Step:
    """The step of the run that `config` describes, on batches of these fields.

    Raises:
      UsageError: settings that cannot be, a model that does not take such batches.
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
