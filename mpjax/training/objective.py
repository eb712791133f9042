"""The objective of a run: its loss and its metrics as functions of (model, batch), and their means."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, is_floating, widest


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


def mean_of(values: jax.Array) -> Mean:
    """Averages floating [B, ...] with equal weights, in float32 or wider."""
    values = values.astype(widest(values.dtype, FLOAT32))
    return Mean(jnp.sum(values), jnp.asarray(values.size, values.dtype))


def as_mean(value: Any, name: str) -> Mean:
    """Converts a loss or metric to a `Mean` in float32 or wider; a scalar has weight 1.

    Raises:
      UsageError: the value is neither a `Mean` nor a scalar, or total and weight have different shapes; the message
        calls it `name`.
    """
    if isinstance(value, Mean):
        total, weight = jnp.asarray(value.total), jnp.asarray(value.weight)
        if total.shape != weight.shape:
            raise UsageError(f"{name} is a Mean of a total {total.shape} and a weight {weight.shape}: wanted one shape")
        dtype = widest(FLOAT32, *(x.dtype for x in (total, weight) if is_floating(x)))
        return Mean(total.astype(dtype), jax.lax.stop_gradient(weight).astype(dtype))
    value = jnp.asarray(value)
    if value.shape:
        raise UsageError(f"{name} has shape {value.shape}: wanted a scalar, or an mpjax.training.Mean")
    value = value.astype(widest(value.dtype, FLOAT32) if is_floating(value) else FLOAT32)
    return Mean(value, jnp.ones((), value.dtype))


def value_of(value: Any) -> jax.Array:
    """The value of a `Mean`; any other value unchanged."""
    return value.value if isinstance(value, Mean) else value


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
Means = dict[str, Mean]
Sums = Mapping[str, np.ndarray]
Prepare = Callable[[Batch, jax.Array | None], Batch]


def means(sums: Sums) -> dict[str, float]:
    """Divides each sum by `count`, the number of examples."""
    return {name: float(total / sums["count"]) for name, total in sums.items() if name != "count"}


class Objective(NamedTuple):
    """The loss and the metrics of a task.

    Attributes:
      prepare: `(batch, key) -> batch`, which augments unless the key is None. It takes the whole batch, because it may
        mix examples.
      loss_of: `(model, batch, key) -> (loss, metrics)` of a prepared batch or of a device's part of it. The loss and
        each metric are a `Mean` in float32 or wider.
      outputs_of: `(model, batch) -> outputs` of a prepared batch in evaluation, such as logits.
      values_of: `(outputs, batch) -> values`: one float32 [B, ...] array per quantity, to be summed over all examples.
      conclude: maps these sums over a whole set (float64, with `count`, the number of examples) to metrics.
    """

    prepare: Prepare
    loss_of: Callable[[nnx.Module, Batch, jax.Array], tuple[Mean, Means]]
    outputs_of: Callable[[nnx.Module, Batch], Any]
    values_of: Callable[[Any, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means

    def names(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the metrics over a set, from the shapes of `values_of`."""
        ones = {name: np.ones(x.shape[1:]) for name, x in values.items()}
        return tuple(self.conclude({**ones, "count": np.ones(())}))

    def loss(self, model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        """Computes the loss and the metrics of a stored batch."""
        return self.loss_of(model, self.prepare(batch, key), key)

    def measure(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Computes the quantities to sum over a set, for a stored batch."""
        batch = self.prepare(batch, None)
        return self.values_of(self.outputs_of(model, batch), batch)


def as_stored(batch: Batch, key: jax.Array | None) -> Batch:
    """Prepares a batch without augmentation: returns it unchanged."""
    del key
    return batch
