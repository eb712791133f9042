"""Checks a user's objective and augmentation by a trace on shapes, before a run has a folder."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from mpjax.errors import UsageError, first_line
from mpjax.training.setup import Task
from mpjax.training.state import take_apart


TARGET = "target"
"""The field of a training batch with the labels of mixed images."""


def check_objective(task: Task, batch: Mapping[str, Any], *, name: str, mixing: str = "") -> None:
    """Checks that a user's objective can be computed and that its loss has a gradient.

    Args:
      task: the task, with the objective.
      batch: the shapes of a stored batch.
      name: the name of the objective in messages.
      mixing: the settings that mix images with their labels, for messages.

    Raises:
      UsageError: the objective raises it; the loss does not depend on a trained parameter; or images are mixed, and the
        loss does not depend on the mixed labels.
    """
    objective = task.objective

    def measured(model: nnx.Module, batch: Any):
        return objective.values_of(objective.outputs_of(model, batch), batch)

    plain, augmented = prepared_shapes(task, batch)
    nnx.eval_shape(measured, task.abstract, plain)
    _, params, stats = take_apart(task.abstract)
    trained = {path: param for path, param in params.items() if path not in task.frozen}
    rest = {path: param for path, param in params.items() if path in task.frozen}

    def loss_of(trained, rest, stats, key, batch):
        model = task.structure.assemble({**rest, **trained}, stats, key)
        model.train()
        return objective.loss_of(model, batch, key)[0].value

    given = trained, rest, stats, _key(), augmented
    gradient = jax.grad(loss_of)
    if not any(jax.tree.leaves(used_arguments(gradient, *given))) and _is_zero(gradient, given):
        raise UsageError(
            f"{name}: the loss does not depend on any parameter that is trained: its gradient is 0 everywhere; compute "
            "it from what the model returns, without argmax, rounding or stop_gradient in between"
        )
    if mixing and TARGET in augmented and not used_arguments(loss_of, *given)[-1][TARGET]:
        raise UsageError(
            f"{mixing}: images are mixed, and {name} does not use their mixed labels, batch['{TARGET}'] "
            f"{list(augmented[TARGET].shape[1:])} per example, which a training batch has; batch['label'] is that of "
            "the image before; use it, or leave out what mixes"
        )


def check_augmentation(task: Task, batch: Mapping[str, Any], *, name: str) -> None:
    """Checks that a user's augmentation can be computed, and the loss of its result.

    Raises:
      UsageError: as `preparation_of`; or the loss cannot be computed for images of the returned shape.
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
    """The shapes of a batch prepared for evaluation, and of one prepared for training."""
    prepare = task.objective.prepare
    plain = jax.eval_shape(lambda batch: prepare(batch, None), batch)
    return dict(plain), dict(jax.eval_shape(prepare, batch, _key()))


def _key() -> Any:
    return jax.eval_shape(jax.random.key, 0)


def _is_zero(gradient: Any, given: tuple[Any, ...]) -> bool:
    """True if a gradient that depends on no argument is zero, and not another constant."""

    def zeros(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.zeros(shape.shape, shape.dtype)

    found = gradient(*jax.tree.map(zeros, given))
    return not any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(found))


def used_arguments(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Marks each leaf of the arguments: True if a result of the function may depend on its value.

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
