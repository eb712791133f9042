"""What is trained and what is measured: functions of (model, batch), handed to the train and eval steps."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
Sums = Mapping[str, np.ndarray]


def means(sums: Sums) -> dict[str, float]:
    """Each sum over the number of examples, `count`."""
    return {name: float(total / sums["count"]) for name, total in sums.items() if name != "count"}


class Objective(NamedTuple):
    """A task.

    Attributes:
      loss: `(model, batch, key) -> (loss, metrics)`: float32 scalars, means over the batch.
      measure: `(model, batch) -> values`: one float32 [B, ...] array per quantity, to be summed over all examples.
      conclude: from those sums over a whole set (float64, and `count`, the number of examples) to its metrics.
    """

    loss: Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, Metrics]]
    measure: Callable[[nnx.Module, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means
