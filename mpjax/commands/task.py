"""Builds what a run trains: the model under its policy, its optimizer, its layout on devices, and its training step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from mpjax import data, models
from mpjax.config import Config
from mpjax.config.folders import cache_folder, data_folder
from mpjax.errors import UsageError
from mpjax.models.scan import require_alike, stacks_of
from mpjax.plan.shapes import batch_shapes
from mpjax.precision.calls import modules_of
from mpjax.precision.casting import autocast, full_precision
from mpjax.precision.modules import PolicyReport, apply_policy, scope_policy, storage_policy
from mpjax.training import make_train_step
from mpjax.training.layout import FSDP, TENSOR, Layout, divide
from mpjax.training.objectives import objective_of
from mpjax.training.optimizer import ELEMENTWISE, learning_rate_schedule, update_rule, with_precision
from mpjax.training.packing import UNPACKED, Packed, Packing
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.remat import apply_remat, blocks_of
from mpjax.training.setup import Task, check_fit
from mpjax.training.state import take_apart, uncast
from mpjax.training.tensor import tensor_axes


def set_up_jax(config: Config, plan: PrecisionPlan) -> None:
    """Keeps compiled programs in the cache folder, and enables x64 for a float64 policy; call it before any array."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder(config) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if plan.float64:
        jax.config.update("jax_enable_x64", True)


def open_task(config: Config) -> tuple[PrecisionPlan, data.Source, Task]:
    """Settles the precision of a stored run, opens its data set, and builds its task.

    Raises:
      UsageError: the settings are invalid, or the data is missing.
    """
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    source = data.open_source(config.data, data_folder(config), config.task)
    return plan, source, make_task(config, plan, data.batch_fields(source, config.data))


def make_task(config: Config, plan: PrecisionPlan, fields: data.Fields) -> Task:
    """Builds the task that `config` describes, on batches of these fields, without creating an array.

    Raises:
      UsageError: a rule of the policy matches no module, or the model has no blocks to rematerialise.
    """
    autocasting = plan.mode == "autocast"
    policy = storage_policy(plan.policy) if autocasting else plan.policy

    def build(key: jax.Array) -> nnx.Module:
        return models.build_model(config.model, fields=fields, rngs=nnx.Rngs(key))

    def set_precision(model: nnx.Module) -> PolicyReport:
        report = apply_policy(model, policy)
        apply_remat(model, config.training.remat)
        return report

    def make_model(key: jax.Array) -> nnx.Module:
        set_precision(model := build(key))
        return model

    abstract: Any = nnx.eval_shape(build, jax.random.key(0))
    require_alike(abstract, plan.policy.rules, "--precision.rules")
    report = set_precision(abstract)
    # Pixels are not activations: autocast must not cast the operations that augment them.
    prepare = full_precision(functools.partial(data.prepare, config=config.data, fields=fields))
    chunk = config.training.chunked_loss
    if chunk and not all(callable(getattr(abstract, name, None)) for name in ("features", "logits")):
        raise UsageError(
            f"--training.chunked_loss {chunk}: {config.model.name} has no methods `features` and `logits` to compute "
            "the logits of some tokens at a time with; write --training.chunked_loss 0"
        )
    objective = objective_of(config.task, prepare, policy, label_smoothing=config.training.label_smoothing, chunk=chunk)
    cast = uncast
    if autocasting:
        cast = functools.partial(
            autocast, policy=scope_policy(abstract, plan.policy), scopes=tuple(modules_of(abstract))
        )
    return Task(take_apart(abstract)[0], objective, cast, report, make_model, abstract)


def make_step(
    config: Config, plan: PrecisionPlan, fields: data.Fields, *, steps: int, warmup: int
) -> tuple[Task, optax.GradientTransformation, Callable[..., jax.stages.Wrapped]]:
    """Builds the task that `config` describes, its optimizer, and a function from layout to compiled training step.

    The function takes the packing of the states that the step is to be called with as a second argument.

    Args:
      config: the settings of the run.
      plan: the precision of the run.
      fields: the fields of a batch.
      steps: the length of training, which schedules need.
      warmup: the steps until the peak of the learning rate.

    Raises:
      UsageError: as `make_task`, or the model does not fit the task.
    """
    task = make_task(config, plan, fields)
    check_fit(task.abstract, config.task, fields, name=config.model.name, dtype=plan.policy.compute_dtype)
    schedule = learning_rate_schedule(config.optimizer, steps=steps, warmup=warmup)
    tx = with_precision(
        update_rule(config.optimizer, schedule, stacks_of(task.abstract)),
        config.precision,
        loss_scale=plan.loss_scale,
        masters=plan.master_weights,
    )

    def step_on(layout: Layout | None, packing: Packing = UNPACKED) -> jax.stages.Wrapped:
        return make_train_step(
            Packed(task.structure, packing),
            tx,
            task.objective.loss_of,
            prepare=task.objective.prepare,
            cast=task.cast,
            learning_rate=schedule,
            accumulate=config.training.accumulate,
            ema=config.training.ema,
            seed=config.seed,
            layout=layout,
        )

    return task, tx, step_on


def make_packing(config: Config, task: Task, layout: Layout) -> Packing:
    """Returns the packing of a run's state: of its small arrays on one device, if the optimizer allows it."""
    # On several devices, the sum of a packed gradient would wait for the last array of the backward pass.
    if config.optimizer.name not in ELEMENTWISE or layout.mesh.size > 1:
        return UNPACKED
    _, params, stats = take_apart(task.abstract)
    return Packing.of(params, stats, stacks_of(task.abstract))


def make_layout(config: Config, plan: PrecisionPlan, task: Task, fields: data.Fields, mesh: Mesh) -> Layout:
    """Divides the arrays of a run over a mesh.

    Raises:
      UsageError: as `tensor_axes` and `require_alike`; or a stack of blocks would be divided over `fsdp`.
    """
    _, params, stats = take_apart(task.abstract)
    require_alike(task.abstract, config.mesh.rules, "--mesh.rules")
    parts = mesh.shape[TENSOR]
    divided = divide(params, mesh, tensor_axes(task.abstract, parts, config.mesh.rules) if parts > 1 else {})
    layout = Layout(mesh, divided=divided, reduce_dtype=plan.policy.reduce_dtype, batch_norm=config.training.batch_norm)
    if mesh.shape[FSDP] == 1:
        return layout
    if stacks_of(task.abstract):
        raise UsageError(
            f"--mesh.fsdp {mesh.shape[FSDP]} with --model.scan_blocks: parameters are gathered block by block, and a "
            "stack has one array for all blocks; write --model.no_scan_blocks, or --mesh.fsdp 1"
        )
    batch = jax.eval_shape(lambda batch: task.objective.prepare(batch, None), batch_shapes(fields, 1))
    travels, given = task.narrowed(params, stats, batch)
    return dataclasses.replace(layout, travels=travels, given=given, blocks=tuple(blocks_of(task.abstract)))
