"""Builds the learner of a run: the model under its policy, its objective, its optimizer, and its step on a mesh."""

import contextlib
import dataclasses
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from mpjax.commands.jax_settings import set_up_jax
from mpjax.commands.objective import choose_objective
from mpjax.config.folders import data_folder
from mpjax.config.schema import Config
from mpjax.config.user_code import may_name_code
from mpjax.data.augment.preparation import preparation_of
from mpjax.data.example_reader import batch_fields
from mpjax.data.examples import Source
from mpjax.data.fields import Fields, batch_shapes
from mpjax.data.open import open_source
from mpjax.data.orientation import MIRRORED
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, PARAMETER_AXES, TENSOR
from mpjax.models.build import build_model
from mpjax.models.fixed import fixed_paths
from mpjax.models.remat import apply_remat, blocks_of
from mpjax.models.scan import require_alike, stack_of, stacks_of
from mpjax.precision.calls import modules_of
from mpjax.precision.casting.own_sums import has_own_code
from mpjax.precision.float8.layers import recipe_of
from mpjax.precision.float8.recipes import E4M3, FLOAT8, require_undivided
from mpjax.precision.modules import apply_policy, has_products_in_float8, scope_policy
from mpjax.precision.policy_report import PolicyReport
from mpjax.training import freezing
from mpjax.training.kernels import Kernels, kernels_of
from mpjax.training.layout import Layout, divide
from mpjax.training.optimizer import treats_numbers_one_by_one, update_rule, with_precision
from mpjax.training.packing import UNPACKED, PackedElementwise, Packing
from mpjax.training.precision_plan import PrecisionPlan, plan_precision
from mpjax.training.rates import factors_of
from mpjax.training.schedule import capped_warmup, learning_rate_schedule
from mpjax.training.setup import Placed, Task, as_loaded, check_fit
from mpjax.training.state import take_apart, uncast
from mpjax.training.tensor import tensor_axes
from mpjax.training.train_step import make_train_step


if TYPE_CHECKING:  # few runs have statistics of their columns
    from mpjax.data.encoding import Encoding


def open_task(
    config: Config, stored: "Encoding | None" = None, source: Source | None = None
) -> tuple[PrecisionPlan, Source, Task]:
    """Opens the data set of a stored run and builds its task, without mixed-in sets and the user's own augmentation.

    It also changes JAX's configuration (`set_up_jax`). `stored` are the statistics by which the run read its columns,
    if it has any (`Config.is_encoded`). With a `source`, such as one without examples, nothing is opened.

    Returns:
      The precision, the examples, and the task: the model under its policy, and its objective.

    Raises:
      UsageError: the settings are invalid, or the data is missing.
    """
    plan = plan_precision(config.precision)
    set_up_jax(config, plan)
    data = dataclasses.replace(config.data, mix={}, augment="")  # both are for training only
    if source is None:
        source = open_source(data, data_folder(config), config.task, stored)
    return plan, source, make_task(dataclasses.replace(config, data=data), plan, batch_fields(source, data))


def make_task(config: Config, plan: PrecisionPlan, fields: Fields) -> Task:
    """Builds the model (abstract, under its policy) and the objective of `config`, for batches with these fields.

    No array of the model is created. With an own model, its code runs in Python, and arrays that it keeps besides its
    variables are computed.

    Raises:
      UsageError: the model cannot be built on these fields, a rule of the policy or a pattern of frozen parameters
        matches nothing, the model has no blocks to rematerialise, or `preparation_of` or `choose_objective` raises.
    """
    policy = plan.module_policy
    if config.model.folder and "image" in fields:
        from mpjax.models.pretrained.files import find_folder  # local, because few runs need it
        from mpjax.models.vision.images import require_statistics

        require_statistics(find_folder(config.model.folder), config.data.mean, config.data.std)

    def build(key: jax.Array) -> nnx.Module:
        return build_model(config.model, fields=fields, rngs=nnx.Rngs(key))

    def set_precision(model: nnx.Module) -> PolicyReport:
        report = apply_policy(model, policy)
        if lora:
            report = lora.store(model, report)
        if frozen:
            freezing.freeze_statistics(model, frozen)
        if config.training.remat != "none":
            apply_remat(model, config.training.remat)
        return report

    def make_model(key: jax.Array) -> nnx.Module:
        set_precision(model := build(key))
        return model

    # A module of the user may keep arrays besides its variables, such as `self.offsets = jnp.arange(8)`. The trace of
    # `build` ends here, but these arrays are constants of every later program.
    is_users_model = may_name_code(config.model.name) and not config.model.folder
    with jax.ensure_compile_time_eval() if is_users_model else contextlib.nullcontext():
        abstract: Any = nnx.eval_shape(build, jax.random.key(0))
    require_alike(abstract, plan.policy.rules, "--precision.rules")
    frozen, lora, complete = frozenset(), None, as_loaded
    if config.training.freeze:
        frozen = freezing.frozen_paths(abstract, config.training.freeze)
    if config.training.lora:
        from mpjax.training.lora import lora_of  # local, like all imports that few runs need

        lora = lora_of(config.training, abstract, policy)
        frozen = lora.frozen
    report = set_precision(abstract)
    if lora:
        complete = lora.adapted(abstract)
    prepare, cast = preparation_of(config.data.for_task(config.task), fields), uncast
    if plan.mode == "autocast":
        from mpjax.precision.casting.transform import autocast, full_precision  # local, because few runs need them

        prepare = full_precision(prepare)  # pixels are not activations
        cast = functools.partial(
            autocast,
            policy=scope_policy(abstract, plan.policy),
            scopes=tuple(modules_of(abstract)),
            require_float8=has_products_in_float8(abstract, plan.policy),
        )
    elif config.training.objective or config.training.metrics or has_own_code(abstract):
        from mpjax.precision.casting.own_sums import with_sums_in_float32

        cast = with_sums_in_float32
    objective = choose_objective(config, prepare, policy, abstract, fields)
    return Task(take_apart(abstract)[0], objective, cast, report, make_model, abstract, frozen, complete)


@dataclasses.dataclass(frozen=True)
class Learner:
    """The model, the objective and the optimizer of a run, before its devices are chosen.

    Attributes:
      config: the settings of the run.
      plan: the precision of the run.
      fields: the fields of a batch.
      task: the model and its objective.
      tx: the optimizer, with clipping, loss scaling and master weights.
      schedule: the learning rate as a function of applied steps.
      kernels: the parameters that decay.
    """

    config: Config
    plan: PrecisionPlan
    fields: Fields
    task: Task
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    kernels: Kernels

    @functools.cached_property
    def transfer_dtypes(self) -> tuple[dict[str, np.dtype], dict[str, np.dtype]]:
        """The dtypes in which parameters are gathered, and in which the model then receives them, by path."""
        _, params, stats = take_apart(self.task.abstract)
        return self.task.transfer_dtypes(params, stats, prepared_shapes(self.task, self.fields))

    def on(self, mesh: Mesh) -> Placed:
        """Builds the layout, the packing and the jitted training step of the run for a mesh; compiles nothing.

        Raises:
          UsageError: the arrays or float8 products of the run cannot be divided over the mesh, or its devices cannot
            run a kernel that the settings ask for.
        """
        if self.plan.policy.recipes:
            require_undivided(self.plan.policy.recipes, mesh.shape[TENSOR])
        if self.config.model.norm_kernel == "pallas":
            from mpjax.commands.norm_kernel import require_norm_kernel  # local, because few runs have it

            require_norm_kernel(self.task.abstract, self.plan, mesh)
        layout = _layout(self, mesh)
        packing = _packing(self.config, self.task, self.kernels, layout)
        train_step = make_train_step(
            PackedElementwise(self.task.structure, packing),
            self.tx,
            self.task.objective.loss_of,
            prepare=self.task.objective.prepare,
            cast=self.task.cast,
            learning_rate=self.schedule,
            accumulate=1 if self.task.objective.divides else self.config.training.accumulate,
            ema=self.config.training.ema,
            seed=self.config.seed,
            layout=layout,
            frozen=self.task.frozen,
            compiler_options={},  # the calls that hold the step are compiled with those of the run
        )
        return Placed(layout, packing, train_step)


def make_learner(config: Config, plan: PrecisionPlan, fields: Fields, *, steps: int, warmup: int) -> Learner:
    """Builds the model, the objective and the optimizer that `config` describes, without creating an array.

    The learning rate has its peak after `warmup` steps, or a fifth of `steps` if that is less, and ends after `steps`.

    Raises:
      UsageError: as `make_task`; the model's outputs do not fit the task; the user's augmentation or objective fails on
        a batch of shapes; or the optimizer or the schedule is invalid.
    """
    task = make_task(config, plan, fields)
    # A batch of a run holds these flags of the mirrored examples.
    oriented = {MIRRORED: jax.ShapeDtypeStruct((2,), bool)} if config.data.alternate_flips else {}
    stored = {**batch_shapes(fields, 2), **oriented}
    if config.data.augment:
        from mpjax.training.user_objective import check_augmentation  # local, because few runs augment by own code

        check_augmentation(task, stored, name=f"--data.augment {config.data.augment}")
    if objective := config.training.objective:
        from mpjax.training.user_objective import check_objective  # local, because most runs have their task's

        mixing = [f"--data.{name} {value}" for name in ("mixup", "cutmix") if (value := getattr(config.data, name))]
        check_objective(task, stored, name=f"--training.objective {objective}", mixing=" and ".join(mixing))
    else:
        check_fit(task.abstract, config.task, fields, name=str(config.model.name), dtype=plan.policy.compute_dtype)
        if config.data.documents == "apart" and may_name_code(config.model.name) and not config.model.folder:
            from mpjax.models.documents import require_apart

            tokens: Any = fields["tokens"]
            shape = jax.ShapeDtypeStruct((2, tokens.length - 1), jax.numpy.int32)
            require_apart(task.abstract, shape, name=str(config.model.name))
    if config.training.lora:
        from mpjax.training.lora import require_called

        require_called(task, prepared_shapes(task, fields))
    schedule = learning_rate_schedule(config.optimizer, steps=steps, warmup=warmup)
    _, params, _ = take_apart(task.abstract)
    kernels, factors = kernels_of(task.abstract), {}
    if config.optimizer.rates or config.optimizer.layer_decay != 1:
        factors = factors_of(config.optimizer, task, prepared_shapes(task, fields))
    rule = update_rule(
        config.optimizer,
        schedule,
        kernels,
        factors=factors,
        params={name: param for name, param in params.items() if name not in task.frozen},
        steps=steps,
        warmup=capped_warmup(steps, warmup),
    )
    tx = with_precision(rule, config.precision, loss_scale=plan.loss_scale, weights=plan.weights)
    if task.frozen:
        # A diagnosis passes the blocks of a stack one by one.
        tx = freezing.trained_only(tx, task.frozen | task.frozen_apart)
    return Learner(config, plan, fields, task, tx, schedule, kernels)


def _packing(config: Config, task: Task, kernels: Kernels, layout: Layout) -> Packing:
    """Plans to pack small arrays if there is one device, the optimizer is elementwise and no array is frozen.

    Otherwise nothing is packed.
    """
    # On several devices, the sum of a packed gradient would wait for the last array of the backward pass. Frozen arrays
    # are identified by path.
    if not treats_numbers_one_by_one(config.optimizer) or task.frozen or layout.mesh.size > 1:
        return UNPACKED
    _, params, stats = take_apart(task.abstract)
    return Packing.of(params, stats, kernels)


def _layout(learner: Learner, mesh: Mesh) -> Layout:
    """Builds the layout of a run: the sharding of its arrays over a mesh, and the dtypes in which `fsdp` gathers them.

    Raises:
      UsageError: as `tensor_axes`, `require_alike`, with `mesh.context` `require_parts_of_texts` and, with
        `mesh.sequence`, `require_positions`; or `mesh.float8_gather` is set and no parameter can be gathered in float8.
    """
    config, plan, task = learner.config, learner.plan, learner.task
    _, params, _ = take_apart(task.abstract)
    require_alike(task.abstract, config.mesh.rules, "--mesh.rules")
    shards = mesh.shape[TENSOR]
    over_tensor = tensor_axes(task.abstract, shards, config.mesh.rules) if shards > 1 else {}
    stacks = stacks_of(task.abstract)
    divided = divide(params, mesh, over_tensor, [name for name in params if stack_of(name, stacks)])
    layout = Layout(
        mesh,
        divided=divided,
        reduce_dtype=plan.policy.reduce_dtype,
        batch_norm=config.training.batch_norm,
        sequence=config.mesh.sequence,
        context=mesh.shape[CONTEXT] > 1,
        fixed=fixed_paths(task.abstract),
    )
    if layout.context:
        from mpjax.commands.context import require_parts_of_texts  # local, because few runs divide texts

        require_parts_of_texts(config, task, prepared_shapes(task, learner.fields), mesh)
    if config.mesh.sequence:
        from mpjax.commands.sequence import require_positions  # local, because few runs divide positions

        require_positions(config, plan, task, prepared_shapes(task, learner.fields), over_tensor, mesh)
    if all(mesh.shape[axis] == 1 for axis in PARAMETER_AXES):
        if config.mesh.float8_gather:
            raise UsageError("--mesh.float8_gather gathers over fsdp, and --mesh.fsdp is 1: leave it out")
        return layout
    travels, model_dtypes = learner.transfer_dtypes
    if config.mesh.float8_gather:
        travels = travels | dict.fromkeys(_quantised_weights(task, divided), E4M3)
    return dataclasses.replace(layout, travels=travels, given=model_dtypes, blocks=tuple(blocks_of(task.abstract)))


def _quantised_weights(task: Task, divided: Collection[str]) -> list[str]:
    """Lists the kernels in `divided`, paths of sharded parameters, that their layers quantise to float8 with one scale.

    Raises:
      UsageError: there are none.
    """
    recipes = {f"{path}/kernel": recipe_of(module) for path, module in modules_of(task.abstract).items()}
    weights = [name for name in divided if recipes.get(name) == FLOAT8]
    if not weights:
        raise UsageError(
            "--mesh.float8_gather: no weight that is divided over fsdp is quantised by one scale; write "
            "--precision.policy mixed_float8, or leave it out"
        )
    return weights


def prepared_shapes(task: Task, fields: Fields) -> Any:
    """The shapes and dtypes of a batch of one example, prepared as in evaluation."""
    return jax.eval_shape(lambda batch: task.objective.prepare(batch, None), batch_shapes(fields, 1))
