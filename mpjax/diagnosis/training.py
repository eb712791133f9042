"""The diagnosis of a training step: of the trainer's model, objective and state."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from mpjax import data
from mpjax.config import Config
from mpjax.diagnosis.diagnose import diagnose_program
from mpjax.diagnosis.diagnosis import Diagnosis
from mpjax.diagnosis.program import Program, program_of
from mpjax.precision.loss_scale import loss_scale_state
from mpjax.precision.policy import Policy
from mpjax.training.precision import PrecisionPlan
from mpjax.training.setup import make_task
from mpjax.training.state import TrainState, step_key
from mpjax.training.structure import take_apart


def diagnose_step(
    config: Config,
    plan: PrecisionPlan,
    source: data.Source,
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    loss_scale: float | None = None,
    tolerance: float = 0.05,
    search: bool = True,
) -> Diagnosis:
    """Diagnoses the step that `state` takes on `batch`, forward and backward.

    Args:
      config: the run's settings.
      plan: its precision decision; with a policy in full precision there is float32 alone to look at.
      source: its examples, for the shapes of the model.
      state: before the step.
      batch: of the step; all of it, also where the run takes it in micro-batches.
      loss_scale: of the step; by default the state's.
      tolerance: as of `mpjax.diagnose`.
      search: as of `mpjax.diagnose`.
    """
    key = step_key(config.seed, state)
    shape = data.image_shape(source, config.data)

    def make(policy: Policy) -> Program:
        task = make_task(config, plan._replace(policy=policy), image_shape=shape, num_classes=source.num_classes)
        abstract: Any = nnx.eval_shape(task.make_model, jax.random.key(0))
        dtypes = {name: leaf.dtype for name, leaf in take_apart(abstract)[1].items()}
        params = {name: value.astype(dtypes[name]) for name, value in state.params.items()}

        @task.cast
        def loss_of(params, stats, key, batch):
            model = task.structure.assemble(params, stats, key)
            model.train()
            return task.objective.loss(model, batch, key)[0]

        ruled = [row.path for row in task.precision if row.compute_dtype is not None]
        return program_of(loss_of, params, (state.stats, key, batch), before=state.params, ruled=ruled)

    scale = float(loss_scale_state(state.opt_state).scale) if loss_scale is None else loss_scale
    return diagnose_program(make, plan.policy, scale, tolerance, search)
