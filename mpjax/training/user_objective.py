"""An objective from a user's function, which computes a loss and metrics for each example."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.config.user_calls import named_failure
from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.training.objective import Batch, Mean, Means, Metrics, Objective, Sums


OUTPUTS = "outputs"
"""The entry of an objective's result that is passed to metrics and is no metric itself."""

WEIGHT = "/weight"
"""The suffix of a metric's name for the sum of its weights."""

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


def own_objective(function: Callable, prepare: Callable[[Batch, jax.Array | None], Batch], *, name: str) -> Objective:
    """Creates the objective of a user's function (`mpjax.extend.Objective`).

    Args:
      function: maps `(model, batch, key)` or `(model, batch)` to values per example.
      prepare: `(batch, key) -> batch`, which augments unless the key is None.
      name: the name of the function, for messages.

    Raises:
      UsageError: the function has another signature. During its trace: it fails, its result is no mapping or has no
        `loss`, a value does not have one entry per example, or its loss is of integers.
    """
    given = _parameters(function, name)

    def called(model, batch: Batch, key: jax.Array | None) -> dict[str, Any]:
        evaluated = " (in evaluation, where `key` is None)" if key is None and given == 3 else ""
        with named_failure(f"{name} failed{evaluated}", function):
            found = function(*(model, batch, key)[:given])
        if not isinstance(found, Mapping) or "loss" not in found:
            kind = f"a mapping of {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
            raise UsageError(f"{name} returned {kind}; wanted a dict with `loss`, [B], and metrics, [B] each")
        _require_floating(found["loss"], name)
        return dict(found)

    def loss_of(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        found = called(model, batch, key)
        found.pop(OUTPUTS, None)
        size = _size(batch)
        means = {metric: _mean(per_example(value, size, f"{name}: {metric}")) for metric, value in found.items()}
        loss = means.pop("loss")
        require_names(means, name)
        return loss, means

    def values_of(found: dict[str, Any], batch: Batch) -> Metrics:
        found = {metric: value for metric, value in found.items() if metric != OUTPUTS}
        require_names([metric for metric in found if metric != "loss"], name)
        return dict(quantities(found, _size(batch), name))

    return Objective(prepare, loss_of, lambda model, batch: called(model, batch, None), values_of, quotients)


def _parameters(function: Callable, name: str) -> int:
    """The number of arguments: 3 for (model, batch, key), 2 for (model, batch)."""
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
    total = loss.total if isinstance(loss, Mean) else loss
    if is_array(total) and not is_floating(jnp.asarray(total)):
        raise UsageError(
            f"{name}: loss is {jnp.asarray(total).dtype}: wanted floating point, because no gradient flows through "
            "integers; compute it from what the model returns, without argmax or rounding"
        )


def _size(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def require_names(names: Any, where: str) -> None:
    """Raises UsageError if a metric has a name that a run uses for another value."""
    for name in names:
        if name in _TAKEN or name.endswith(WEIGHT):
            raise UsageError(f"{where}: {name} is the name of something else in a run; give the metric another name")


def per_example(value: Any, size: int, name: str) -> Mean:
    """Converts a value per example to totals and weights, both [B], in float32 or wider.

    Raises:
      UsageError: the value is no array, or has another shape; the message shows how to write a mean over the batch.
    """
    parts = (value.total, value.weight) if isinstance(value, Mean) else (value, jnp.ones(size, FLOAT32))
    for part in parts:
        if not is_array(part):
            raise UsageError(f"{name} is {kind_of(part)}: wanted one value per example, [{size}], or {_A_MEAN}")
    total, weight = (jnp.asarray(part) for part in parts)
    for part in (total, weight):
        if part.shape != (size,):
            raise UsageError(
                f"{name} has shape {part.shape} for a batch of {size}: wanted one value per example, [{size}], or "
                f"{_A_MEAN}; mpjax takes the mean itself, over all devices"
            )
    dtype = widest(FLOAT32, *(part.dtype for part in (total, weight) if is_floating(part)))
    return Mean(total.astype(dtype), weight.astype(dtype))


def is_array(value: Any) -> bool:
    """True for an array and for a number, which is an array of no dimensions."""
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or isinstance(value, bool | int | float)


def kind_of(value: Any) -> str:
    """Describes a value that is not an array, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def _mean(value: Mean) -> Mean:
    """Sums totals and weights over the batch."""
    return Mean(jnp.sum(value.total), jnp.sum(value.weight))


def quantities(found: Mapping[str, Any], size: int, where: str) -> Iterator[tuple[str, jax.Array]]:
    """Yields the values to sum over a set, [B] each: totals, and the weights of each `Mean`."""
    for name, value in found.items():
        mean = per_example(value, size, f"{where}: {name}")
        yield name, mean.total
        if isinstance(value, Mean):
            yield name + WEIGHT, mean.weight


def quotients(sums: Sums) -> dict[str, float]:
    """Divides each sum by the sum of its weights, or by `count`, the number of examples; NaN if the divisor is 0."""

    def quotient(name: str) -> float:
        weight = sums.get(name + WEIGHT, sums["count"])
        return float(sums[name] / weight) if weight else float("nan")

    return {name: quotient(name) for name in sums if name != "count" and not name.endswith(WEIGHT)}
