"""Checks a user's objective and augmentation: what they return, and by a trace on shapes that something is learnt."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from mpjax.config.user_calls import named_failure
from mpjax.errors import UsageError, first_line
from mpjax.precision.dtypes import is_floating
from mpjax.training.objective import OUTPUTS, Batch, Mean, Values
from mpjax.training.setup import Task
from mpjax.training.state import take_apart


if TYPE_CHECKING:
    from mpjax.extend import Objective


TARGET = "target"
"""The field of a training batch with the labels of mixed images."""

_A_MEAN = "an mpjax.Mean of totals and weights per example"
_TAKEN = (
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped",
    "consecutive_skips",
    "finite",
    "examples_per_second",
    "count",
)


def checked_objective(function: Callable, *, name: str) -> "Objective":
    """Wraps a user's objective to check what it returns, whenever it is traced; the wrapper takes all three arguments.

    Args:
      function: an `mpjax.extend.Objective`; it may have no third parameter.
      name: the name of the function, for messages.

    Raises:
      UsageError: the function has another signature. During its trace: it fails, its result is no mapping or has no
        `loss`, a value does not have one entry per example, its loss is of integers, or a metric has the name of
        another value of a run.
    """
    parameters = _parameters(function, name)

    def checked(model, batch: Batch, key: jax.Array | None) -> Values:
        evaluated = " (in evaluation, where `key` is None)" if key is None and parameters == 3 else ""
        with named_failure(f"{name} failed{evaluated}", function):
            values = function(*(model, batch, key)[:parameters])
        if not isinstance(values, Mapping) or "loss" not in values:
            is_mapping = isinstance(values, Mapping)
            kind = f"a mapping of {', '.join(map(str, values))}" if is_mapping else type(values).__name__
            raise UsageError(f"{name} returned {kind}; wanted a dict with `loss`, [B], and metrics, [B] each")
        _require_floating(values["loss"], name)
        size = next(iter(batch.values())).shape[0]
        measured = {metric: value for metric, value in values.items() if metric != OUTPUTS}
        for metric, value in measured.items():
            require_per_example(value, size, f"{name}: {metric}")
        require_names(measured, name)
        return dict(values)

    return checked


def _parameters(function: Callable, name: str) -> int:
    """Counts the arguments that an objective takes: 3 for (model, batch, key), 2 for (model, batch).

    Raises UsageError for another signature, or if it is no function. `name` is for the message.
    """
    if not callable(function):
        raise UsageError(f"{name} is a {type(function).__name__}: wanted a function of (model, batch, key)")
    signature = inspect.signature(function)
    for count in (3, 2):
        try:
            signature.bind(*range(count))
            return count
        except TypeError:
            continue
    raise UsageError(f"{name}{signature}: wanted a function of (model, batch) or (model, batch, key)")


def _require_floating(loss: Any, name: str) -> None:
    """Raises UsageError if the loss, or the total of a `Mean`, is an array of integers or bools."""
    total = loss.total if isinstance(loss, Mean) else loss
    if is_array(total) and not is_floating(jnp.asarray(total)):
        raise UsageError(
            f"{name}: loss is {jnp.asarray(total).dtype}: wanted floating point, because no gradient flows through "
            "integers; compute it from what the model returns, without argmax or rounding"
        )


def require_names(names: Iterable[str], where: str) -> None:
    """Raises UsageError if one of `names` is a name that a run uses for another value, such as `grad_norm`.

    `where` begins the message.
    """
    for name in names:
        if name in _TAKEN:
            raise UsageError(f"{where}: {name} is the name of something else in a run; give the metric another name")


def require_per_example(value: Any, size: int, name: str) -> None:
    """Raises UsageError unless a value is an array [size], or a `Mean` of a total [size] and a weight [size]."""
    for array in (value.total, value.weight) if isinstance(value, Mean) else (value,):
        if not is_array(array):
            raise UsageError(f"{name} is {kind_of(array)}: wanted one value per example, [{size}], or {_A_MEAN}")
        if jnp.shape(array) != (size,):
            raise UsageError(
                f"{name} has shape {jnp.shape(array)} for a batch of {size}: wanted one value per example, [{size}], "
                f"or {_A_MEAN}; mpjax takes the mean itself, over all devices"
            )


def is_array(value: Any) -> bool:
    """True for a value with a shape and a dtype, and for a bool, int or float, which is an array of no dimensions."""
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, bool | int | float)


def kind_of(value: Any) -> str:
    """Describes a value that is not an array, for messages: "None", or its type as in "a str"."""
    return "None" if value is None else f"a {type(value).__name__}"


def check_objective(task: Task, batch: Mapping[str, Any], *, name: str, mixing: str = "") -> None:
    """Checks, by a trace on shapes, that a user's objective can be computed and that its loss has a gradient.

    If the gradient depends on no argument, it is computed once, on zeros.

    Args:
      task: the task, with the objective.
      batch: the shapes of a stored batch.
      name: the name of the objective in messages.
      mixing: the settings that mix images with their labels, for messages; empty if none does.

    Raises:
      UsageError: as the result of `checked_objective` during its trace; the gradient is 0 for every trained parameter;
        or images are mixed, and the loss does not depend on the mixed labels.
    """
    objective = task.objective
    nnx.eval_shape(objective.measure, task.abstract, dict(batch))
    _, augmented = prepared_shapes(task, batch)
    _, params, stats = take_apart(task.abstract)
    trained = {path: param for path, param in params.items() if path not in task.frozen}
    rest = {path: param for path, param in params.items() if path in task.frozen}

    def loss_of(trained, rest, stats, key, batch):
        model = task.structure.assemble({**rest, **trained}, stats, key)
        model.train()
        return objective.loss_of(model, batch, key)[0].value

    arguments = trained, rest, stats, _key(), augmented
    gradient = jax.grad(loss_of)
    if not any(jax.tree.leaves(used_arguments(gradient, *arguments))) and _is_zero(gradient, arguments):
        raise UsageError(
            f"{name}: the loss does not depend on any parameter that is trained: its gradient is 0 everywhere; compute "
            "it from what the model returns, without argmax, rounding or stop_gradient in between"
        )
    if mixing and TARGET in augmented and not used_arguments(loss_of, *arguments)[-1][TARGET]:
        raise UsageError(
            f"{mixing}: images are mixed, and {name} does not use their mixed labels, batch['{TARGET}'] "
            f"{list(augmented[TARGET].shape[1:])} per example, which a training batch has; batch['label'] is that of "
            "the image before; use it, or leave out what mixes"
        )


def check_augmentation(task: Task, batch: Mapping[str, Any], *, name: str) -> None:
    """Checks, by a trace on shapes, that a user's augmentation can be computed, and a loss of its result if it resizes.

    Args:
      task: the task, whose objective has the augmentation in its `prepare`.
      batch: the shapes of a stored batch.
      name: the name of the augmentation in messages.

    Raises:
      UsageError: the augmentation fails, drops a field, or changes a dtype or the number of examples; or it changes the
        shape of examples, and the loss cannot be computed for the new shape.
    """
    plain, augmented = prepared_shapes(task, batch)
    changed = {field: x for field, x in augmented.items() if field in plain and x.shape != plain[field].shape}
    if not changed:
        return

    def loss_of(model: nnx.Module, key: jax.Array, batch: Any):
        return task.objective.loss_of(model, batch, key)

    try:
        nnx.eval_shape(loss_of, task.abstract, _key(), augmented)
    except Exception as error:
        shapes = ", ".join(
            f"{field} {list(x.shape[1:])} in place of {list(plain[field].shape[1:])}" for field, x in changed.items()
        )
        raise UsageError(
            f"{name} returned {shapes} per example, of which the loss cannot be computed: {first_line(error)}; return "
            "the shapes that it is given"
        ) from error


def prepared_shapes(task: Task, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes of a stored batch after its preparation for evaluation, and after its preparation for training."""
    prepare = task.objective.prepare
    plain = jax.eval_shape(lambda batch: prepare(batch, None), batch)
    return dict(plain), dict(jax.eval_shape(prepare, batch, _key()))


def _key() -> Any:
    return jax.eval_shape(jax.random.key, 0)


def _is_zero(gradient: Any, arguments: tuple[Any, ...]) -> bool:
    """True if a gradient that depends on no argument is 0 everywhere: computes it on zeros of these shapes."""

    def zeros(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.zeros(shape.shape, shape.dtype)

    values = gradient(*jax.tree.map(zeros, arguments))
    return not any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(values))


def used_arguments(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Replaces each leaf of the arguments by True if a result of the function may depend on its value, else by False.

    An operation depends on all of its operands. A leaf that cannot change a result may be marked True, but a leaf that
    can is never marked False.

    Args:
      function: a function that JAX can trace.
      arguments: arrays, or their shapes.

    >>> import jax.numpy as jnp
    >>> used_arguments(lambda x, y: jnp.sin(x) + y.shape[0], jnp.ones(2), jnp.ones(2))
    (True, False)
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(var for var in equation.invars if isinstance(var, core.Var))
    return jax.tree.unflatten(jax.tree.structure(arguments), [var in needed for var in jaxpr.invars])
