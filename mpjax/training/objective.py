"""The objective of a run: the sums of its values over a batch and over a whole set."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.config.tasks import TaskName, inputs_of
from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.policy import Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Mean:
    """A mean over examples, tokens or pixels, of one device's examples or of one micro-batch.

    Totals and weights of the parts of a batch add up. Their quotient is the mean of the whole batch, even if the parts
    have different weights. A mean of the parts' means is not.

    >>> first, second = Mean(jnp.float32(6), jnp.float32(3)), Mean(jnp.float32(10), jnp.float32(1))
    >>> float(first.value), float(jax.tree.map(jnp.add, first, second).value)
    (2.0, 4.0)

    Attributes:
      total: the weighted sum, a floating scalar, or [K] for a mean of K quotients.
      weight: the sum of the weights, at least 0, with the shape of `total`. In a loss it is a constant: no gradient
        flows through it.
    """

    total: jax.Array
    weight: jax.Array

    @property
    def value(self) -> jax.Array:
        """The mean, a scalar; 0 if all weights are 0.

        Several quotients, such as the intersection over union of each class, are averaged where their weight is
        nonzero.
        """
        counts = self.weight != 0  # True for NaN too, so that it shows in the result
        quotients = jnp.where(counts, self.total / jnp.where(counts, self.weight, 1), 0)
        if not quotients.shape:
            return quotients
        return jnp.sum(quotients) / jnp.maximum(jnp.sum(counts.astype(quotients.dtype)), 1)

    def of_set(self) -> float:
        """The mean in float64, on the host; NaN if all weights are 0. Several quotients are averaged as in `value`."""
        total, weight = np.asarray(self.total, np.float64), np.asarray(self.weight, np.float64)
        counts = weight != 0
        return float(np.mean(total[counts] / weight[counts])) if counts.any() else float("nan")


def as_mean(value: Any, name: str) -> Mean:
    """Converts a loss or metric to a `Mean` in float32 or wider; a scalar has weight 1.

    No gradient flows through the weight of the result.

    Raises:
      UsageError: the value is neither a `Mean` nor a scalar, or total and weight have different shapes; the message
        calls it `name`.
    """
    value = as_floating(value)
    if isinstance(value, Mean):
        if value.total.shape != value.weight.shape:
            shapes = f"a total {value.total.shape} and a weight {value.weight.shape}"
            raise UsageError(f"{name} is a Mean of {shapes}: wanted one shape")
        return Mean(value.total, jax.lax.stop_gradient(value.weight))
    if value.shape:
        raise UsageError(f"{name} has shape {value.shape}: wanted a scalar, or an mpjax.training.Mean")
    return Mean(value, jnp.ones((), value.dtype))


def as_floating(value: Any) -> Any:
    """Casts a number, an array, or all arrays of a `Mean` or other metric to one floating dtype: float32 or wider."""
    value = jax.tree.map(jnp.asarray, value) if hasattr(value, "of_set") else jnp.asarray(value)
    dtype = widest(FLOAT32, *(x.dtype for x in jax.tree.leaves(value) if is_floating(x)))
    return jax.tree.map(lambda x: x.astype(dtype), value)


def value_of(value: Any) -> jax.Array:
    """The value of a `Mean`; any other value unchanged."""
    return value.value if isinstance(value, Mean) else value


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
Values = Mapping[str, Any]
"""The result of an `mpjax.extend.Objective`: values of the examples of a batch, by name."""
Means = dict[str, Mean]
Sums = Mapping[str, Any]
"""Values summed over the examples of a whole set, by name, and their number, `count`."""
Prepare = Callable[[Batch, jax.Array | None], Batch]

OUTPUTS = "outputs"
"""The value of an objective that is passed to metrics and is no metric itself."""


def means(sums: Sums) -> dict[str, float]:
    """Computes the metrics of a whole set by name, in float64 on the host, from the sums over its examples.

    An array is divided by `count`, NaN if that is 0. A value with a method `of_set`, such as a `Mean`, computes itself.
    """

    def concluded(total: Any) -> float:
        return total.of_set() if hasattr(total, "of_set") else Mean(total, sums["count"]).of_set()

    return {name: concluded(total) for name, total in sums.items() if name != "count"}


def inputs_in(batch: Batch, task: TaskName, policy: Policy) -> list[jax.Array]:
    """The inputs of a model that a batch has, in order: images and rows in the compute dtype, all others as they are.

    A network that reads sounds casts them itself, where a rule may keep all bits.
    """
    return [
        policy.cast_to_compute(batch[name]) if name in ("image", "row") else batch[name]
        for name in inputs_of(task, batch)
        if name in batch
    ]


def as_stored(batch: Batch, key: jax.Array | None) -> Batch:
    """Returns the batch itself: the preparation of batches that need none."""
    del key
    return batch


class RunObjective(NamedTuple):
    """An objective with the preparation of its batches, the user's metrics, and the conclusion over a whole set.

    Attributes:
      function: an `mpjax.extend.Objective`, which computes values of the examples of a prepared batch. A value [B, ...]
        is averaged over all its numbers, and a `Mean` of [B, K] over its K quotients.
      prepare: `(batch, key) -> batch`, which augments unless the key is None. It takes the whole batch, because it may
        mix examples.
      metrics: functions `(outputs, batch) -> values`, called in evaluation with the `outputs` of `function`; each
        returns a dict of values by name.
      complete: maps the means of a whole set to its metrics, for example adds the perplexity.
      divides: True if `function` itself runs the micro-batches of a batch one after the other, because its loss is not
        a mean of theirs.
    """

    function: Callable[[nnx.Module, Batch, jax.Array | None], Values]
    prepare: Prepare = as_stored
    metrics: Sequence[Callable[[Any, Batch], Values]] = ()
    complete: Callable[[dict[str, float]], dict[str, float]] = dict
    divides: bool = False

    def loss_of(self, model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        """Computes the loss, and the metrics by name, of a prepared batch or of one device's examples, for training.

        Each is a `Mean` of sums over these examples. The user's `metrics` are not computed.
        """
        values = self.function(model, batch, key)
        totals = {name: _over_batch(value) for name, value in values.items() if name != OUTPUTS}
        return totals.pop("loss"), totals

    def loss(self, model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        """Prepares a stored batch with `key`, which augments it, and returns what `loss_of` computes from it."""
        return self.loss_of(model, self.prepare(batch, key), key)

    def measure(self, model: nnx.Module, batch: Batch) -> dict[str, Any]:
        """Computes the loss and all metrics of a stored batch in evaluation, by name, with one value for each example.

        A value is float32 (or wider) [B], or a `Mean` or another metric whose arrays begin with the axis [B]. Arrays of
        more axes are averaged over them, such as over tokens. The batch is prepared without augmentation.
        """
        batch = self.prepare(batch, None)
        values = dict(self.function(model, batch, None))
        outputs = values.pop(OUTPUTS, None)
        for metric in self.metrics:
            values |= metric(outputs, batch)
        return {name: _per_example(value) for name, value in values.items()}

    def conclude(self, sums: Sums) -> dict[str, float]:
        """Computes the metrics of a whole set, by name, from the sums over its examples: `complete(means(sums))`."""
        return self.complete(means(sums))

    def names(self, values: Values) -> tuple[str, ...]:
        """The names, in order, that `conclude` returns for a set with such `values`; only their names are read."""
        return tuple(self.complete(dict.fromkeys(values, 1.0)))


def _over_batch(value: Any) -> Mean:
    """Sums a value over the examples of a batch; an array becomes the `Mean` of all its numbers."""
    value = as_floating(value)
    if isinstance(value, Mean):
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), value)
    return Mean(jnp.sum(value), jnp.asarray(value.size, value.dtype))


def _per_example(value: Any) -> Any:
    """Averages an array over all its axes but the first; a `Mean` or another metric is only cast."""
    value = as_floating(value)
    if hasattr(value, "of_set") or value.ndim == 1:
        return value
    return jnp.mean(value, axis=tuple(range(1, value.ndim)))
