"""What is trained and what is measured: functions of (model, batch), handed to the train and eval steps."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.precision.policy import Policy
from mpjax.training.losses import correct, cross_entropy


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Objective(NamedTuple):
    """A task.

    Attributes:
      loss: `(model, batch, key) -> (loss, metrics)`: float32 scalars, means over the batch.
      measure: `(model, batch) -> values`: one float32 [B] array per metric.
    """

    loss: Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, Metrics]]
    measure: Callable[[nnx.Module, Batch], Metrics]


def classification(prepare: Callable[..., Any], policy: Policy, *, label_smoothing: float = 0.0) -> Objective:
    """Image classification of batches `{"image": [B, H, W, C], "label": integer [B]}`.

    Args:
      prepare: `(images, key) -> float32 images`, augmented if the key is not None.
      policy: casts the images to its compute dtype: the one place where they are cast.
      label_smoothing: for training only.
    """

    def logits_of(model, batch: Batch, key: jax.Array | None) -> jax.Array:
        return model(policy.cast_to_compute(prepare(batch["image"], key)))

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        logits = logits_of(model, batch, key)
        losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return jnp.mean(losses), {"accuracy": jnp.mean(correct(logits, batch["label"]))}

    def measure(model, batch: Batch) -> Metrics:
        logits = logits_of(model, batch, None)
        return {"loss": cross_entropy(logits, batch["label"]), "accuracy": correct(logits, batch["label"])}

    return Objective(loss, measure)
