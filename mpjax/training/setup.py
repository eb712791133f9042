"""The task of a run: its model and objective, whether they fit, and the states that they begin with."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mpjax.config.schema import Model
from mpjax.config.tasks import COMPARED, NEXT_TOKEN, OF_NUMBERS, OF_ROWS, OF_TARGETS, TASKS, TaskName, inputs_of
from mpjax.data.fields import outputs_of
from mpjax.errors import UsageError
from mpjax.models.pretrained.load import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.scan import names_apart, one_by_one, replaced, stacks_of
from mpjax.precision.casting.narrowing import cast_once, narrowed_inputs
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.policy_report import PolicyReport
from mpjax.training.layout import Layout
from mpjax.training.objective import RunObjective
from mpjax.training.packing import Packing
from mpjax.training.state import Arrays, Structure, TrainState, create_state, take_apart, without_shared_buffers


Shapes = tuple[jax.ShapeDtypeStruct, ...]

_BATCH = 2


def check_fit(model: nnx.Module, task: TaskName, fields: Mapping[str, Any], *, name: str, dtype: Any = FLOAT32) -> None:
    """Checks that the model fits the task, by tracing its forward pass on the shapes of a batch of two examples.

    Logits of language modelling may have more classes than the tokenizer has tokens.

    Args:
      model: the model, which may be abstract.
      task: the task to learn.
      fields: the fields of the data by name, with the shapes and numbers of classes of examples.
      name: the name of the model in messages.
      dtype: the dtype of the images.

    Raises:
      UsageError: the model takes other arguments, or returns logits of another shape. Other errors pass through.
    """
    inputs, expected = _inputs(task, fields, dtype), _expected(task, fields)
    try:
        inspect.signature(model).bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"--model.name {name} cannot be called for --task {task}: {error}; wanted {_signature(task)}"
        ) from error
    logits = nnx.eval_shape(lambda model, *inputs: model(*inputs), model, *inputs)
    shape: Any = getattr(logits, "shape", type(logits).__name__)
    if task in COMPARED and len(shape) == len(expected):
        expected = (*expected[:-1], shape[-1])  # of any number of features
    if task == "image_text" and not callable(getattr(model, "temperature", None)):
        raise UsageError(
            f"--model.name {name} has no `temperature`, with which --task image_text makes logits of cosines: wanted a "
            "module as mpjax.models.image_text.ImageText has"
        )
    if shape != expected and not (task in (*NEXT_TOKEN, *OF_TARGETS) and _has_more_tokens(shape, expected)):
        raise UsageError(
            f"--model.name {name} gives {shape} for a batch of {_BATCH}; wanted logits {expected}: {_signature(task)}"
        )


def _has_more_tokens(shape: Any, expected: tuple[int, ...]) -> bool:
    """True for logits of a vocabulary that is larger than the tokenizer's, as those of published models often are."""
    return isinstance(shape, tuple) and shape[:-1] == expected[:-1] and shape[-1] > expected[-1]


_ARGUMENTS = {
    "image": "images [B, H, W, C]",
    "tokens": "tokens [B, T]",
    "length": "lengths [B]",
    "target_tokens": "targets [B, U]",
    "sound": "sounds [B, frames, bins]",
    "time": "times [B]",
    "label": "labels [B] if there are classes",
}


def _signature(task: TaskName) -> str:
    arguments = ", ".join(_ARGUMENTS[name] for name in TASKS[task].inputs)
    others = (" or rows [B, F]" if task in OF_ROWS else "") + (" or tokens and lengths" if task in OF_NUMBERS else "")
    return f"{arguments}{others} -> {TASKS[task].outputs}"


def _inputs(task: TaskName, fields: Mapping[str, Any], dtype: Any) -> Shapes:
    """The shapes of the model's inputs for a batch of two examples."""

    def shape_of(name: str) -> jax.ShapeDtypeStruct:
        match name:
            case "image" | "row":
                return jax.ShapeDtypeStruct((_BATCH, *fields[name].shape), dtype)
            case "sound":
                return jax.ShapeDtypeStruct((_BATCH, *fields[name].shape), FLOAT32)
            case "tokens" | "target_tokens":
                length = fields[name].length - (task in NEXT_TOKEN)  # the last token is only a label
                return jax.ShapeDtypeStruct((_BATCH, length), jnp.int32)
            case _:
                return jax.ShapeDtypeStruct((_BATCH,), jnp.int32)

    return tuple(shape_of(name) for name in inputs_of(task, fields) if name in ("image", "time") or name in fields)


def _expected(task: TaskName, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The expected shape of the model's outputs for a batch of two examples; -1 for any number of features."""
    match task:
        case "embedding":
            return (_BATCH, -1)
        case "image_text":
            return (_BATCH, 2, -1)
        case "diffusion":
            return (_BATCH, *fields["image"].shape)
        case "segmentation":
            return (_BATCH, *fields["image"].shape[:2], fields["mask"].num_classes)
        case "text_to_text" | "transcription":
            return (_BATCH, fields["target_tokens"].length, fields["target_tokens"].vocabulary)
        case "language_modeling" | "instructions" | "preference":
            return (_BATCH, fields["tokens"].length - 1, fields["tokens"].vocabulary)
        case _:
            return (_BATCH, outputs_of(fields))


def as_loaded(params: Arrays, stats: Arrays, key: jax.Array) -> tuple[Arrays, Arrays]:
    """Returns the arrays of a model as they are: `Task.complete` of a model that has nothing made of its weights."""
    del key
    return params, stats


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its policy applied, and its objective.

    Attributes:
      structure: the model taken apart.
      objective: the loss and the metrics.
      cast: adds the policy's casts to a pure function that calls the model; the identity if the model casts its own
        arrays.
      precision: the report of each submodule's dtypes.
      make_model: `key -> model` with initial values, before `complete`.
      abstract: the model with shapes and dtypes in place of arrays.
      frozen: paths of the parameters and statistics that are not trained; a stacked array has one path.
      complete: `(params, stats, key) -> (params, stats)`: the arrays of `abstract` from those of a model that has its
        weights: what is made of weights, such as adapters, is added. By default nothing is.
    """

    structure: Structure
    objective: RunObjective
    cast: Callable[[Callable], Callable]
    precision: PolicyReport
    make_model: Callable[[jax.Array], nnx.Module]
    abstract: nnx.Module
    frozen: frozenset[str] = frozenset()
    complete: Callable[[Arrays, Arrays, jax.Array], tuple[Arrays, Arrays]] = as_loaded

    @property
    def frozen_apart(self) -> frozenset[str]:
        """The paths in `frozen`, with the paths of all single blocks in place of the path of each stacked array."""
        stacks = stacks_of(self.abstract)
        return frozenset(name for path in self.frozen for name in names_apart(path, stacks))

    def transfer_dtypes(
        self, params: Arrays, stats: Arrays, batch: Mapping[str, Any]
    ) -> tuple[dict[str, np.dtype], dict[str, np.dtype]]:
        """Finds the dtypes to which parameters may be cast before a training step without changing its results.

        Parameters that a step uses only in half precision can be sent to other devices in half precision.

        Args:
          params: parameters, or their shapes.
          stats: statistics, or their shapes.
          batch: a prepared batch, or its shapes.

        Returns:
          Two mappings with all paths: the dtype in which a parameter can be sent to another device without changing a
            result (its own, if none narrower will do), and the dtype in which the model can then receive it.
        """

        @self.cast
        def loss_of(params, stats, key, batch):
            model = self.structure.assemble(params, stats, key)
            model.train()
            return self.objective.loss_of(model, batch, key)[0].value

        inputs = params, stats, jax.eval_shape(jax.random.key, 0), batch
        casts = narrowed_inputs(jax.make_jaxpr(jax.grad(loss_of))(*inputs).jaxpr)
        once = cast_once(jax.make_jaxpr(loss_of)(*inputs).jaxpr)
        travels, out_dtypes = {}, {}
        for name, cast, single in zip(sorted(params), casts, once, strict=False):
            travels[name] = params[name].dtype if cast is None else cast
            out_dtypes[name] = travels[name] if single else params[name].dtype
        return travels, out_dtypes


class Placed(NamedTuple):
    """A training step on a mesh.

    Attributes:
      layout: the mesh, and the division of the state's arrays over it.
      packing: packs states for the step, and unpacks its results.
      train_step: `(packed, batch) -> (packed, metrics)`, jitted, with the state donated.
    """

    layout: Layout
    packing: Packing
    train_step: jax.stages.Wrapped


def pretrained_arrays(task: Task, config: Model) -> tuple[Arrays, PretrainedReport | None]:
    """Loads parameters and statistics from `config.weights`, by path, and reports what was loaded.

    Arrays that are not loaded are left out. The others have the dtypes in which the model stores them. Stacked blocks
    have the paths of single blocks. Without `config.weights` the result is `({}, None)`.

    Raises:
      UsageError: there are patterns of weights to skip, but no weights; or as `mpjax.load_pretrained`.
    """
    if not config.weights:
        if config.pretrained_skip:
            raise UsageError(
                f"--model.pretrained_skip {' '.join(config.pretrained_skip)}: all weights are random, as "
                f"--model.pretrained is {config.pretrained or 'empty'}; leave it out, or name the weights"
            )
        return {}, None
    model: Any = one_by_one(nnx.eval_shape(task.make_model, jax.random.key(0)))
    report = load_pretrained(model, config.weights, skip=config.pretrained_skip)
    _, params, stats = take_apart(model)
    return {row.path: (params | stats)[row.path] for row in report if row.key is not None}, report


def make_state(
    task: Task, tx: optax.GradientTransformation, key: jax.Array, pretrained: Arrays, *, ema: bool
) -> TrainState:
    """Creates the state before the first step, with a moving average of the parameters if `ema`.

    `pretrained` parameters and statistics, by path and with the paths of single blocks, replace the initial values that
    the model draws from `key`.
    """
    model = task.make_model(key)
    _, params, stats = take_apart(model)
    params, stats = (replaced(arrays, pretrained, stacks_of(model)) for arrays in (params, stats))
    params, stats = task.complete(params, stats, key)
    return create_state(params, stats, tx, ema=ema, frozen=task.frozen)


_RUNS_ONCE = {"xla_backend_optimization_level": 0}
"""XLA options for a program that takes longer to compile than to run: the code for random numbers is long."""


def initial_state(
    task: Task,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    ema: bool,
    layout: Layout,
    pretrained: Arrays | None = None,
) -> TrainState:
    """Creates the state of `make_state` in one compiled program, directly on its devices, divided by the layout.

    `seed` is the seed of the initial values. `pretrained` arrays, by path, replace some of them; None replaces none. No
    two arrays of the state share a buffer, so that it can be donated.
    """
    make = functools.partial(make_state, task, tx, ema=ema)
    arguments = jax.random.key(seed), pretrained or {}
    shardings = layout.state(jax.eval_shape(make, *arguments))
    state = jax.jit(make, out_shardings=shardings, compiler_options=_RUNS_ONCE)(*arguments)
    return without_shared_buffers(state)  # a given array that is used twice appears twice in the state


def state_shapes(task: Task, tx: optax.GradientTransformation, *, ema: bool, layout: Layout) -> TrainState:
    """The shapes, dtypes and shardings of the state of `initial_state`, as `jax.ShapeDtypeStruct`; computes nothing."""
    make = functools.partial(make_state, task, tx, ema=ema)
    shapes = jax.eval_shape(make, jax.eval_shape(jax.random.key, 0), {})

    def on(shape, sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(on, shapes, layout.state(shapes))
