"""The objective of a run as one value: its loss and its metrics as functions of (model, batch)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mpjax.training.mean import Mean


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
      prepare: `(batch, key) -> batch`, which augments unless the key is None. It sees the whole batch, because it may
        mix examples.
      loss_of: `(model, batch, key) -> (loss, metrics)` of a prepared batch, or of a device's part of one: a `Mean`, and
        one per metric, in float32 or wider.
      outputs_of: `(model, batch) -> outputs` of a prepared batch in evaluation, such as logits.
      values_of: `(outputs, batch) -> values`: one float32 [B, ...] array per quantity, to be summed over all examples.
      conclude: a function from these sums over a whole set (float64, with `count`, the number of examples) to metrics.
    """

    prepare: Prepare
    loss_of: Callable[[nnx.Module, Batch, jax.Array], tuple[Mean, Means]]
    outputs_of: Callable[[nnx.Module, Batch], Any]
    values_of: Callable[[Any, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means

    def names(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of the metrics over a set, given the shapes of `values_of`."""
        ones = {name: np.ones(x.shape[1:]) for name, x in values.items()}
        return tuple(self.conclude({**ones, "count": np.ones(())}))

    def loss(self, model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        """Computes the loss and the metrics of a batch as it is stored."""
        return self.loss_of(model, self.prepare(batch, key), key)

    def measure(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Computes the quantities to sum up, of a batch as it is stored."""
        batch = self.prepare(batch, None)
        return self.values_of(self.outputs_of(model, batch), batch)


def as_stored(batch: Batch, key: jax.Array | None) -> Batch:
    """Returns a batch that is not augmented."""
    del key
    return batch
