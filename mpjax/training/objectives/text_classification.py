"""Text classification: cross entropy and accuracy of a text's class."""

import jax
import jax.numpy as jnp

from mpjax.training.losses import correct, cross_entropy
from mpjax.training.objectives.classification import scores
from mpjax.training.objectives.objective import Batch, Metrics, Objective


def text_classification(*, label_smoothing: float = 0.0) -> Objective:
    """Batches of `tokens`, integer [B, T], `length`, integer [B], and `label`, integer [B].

    The model takes tokens and lengths, and gives logits [B, num_classes].

    Args:
      label_smoothing: for training only.
    """

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        del key  # nothing is augmented
        logits = model(batch["tokens"], batch["length"])
        losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return jnp.mean(losses), {"accuracy": jnp.mean(correct(logits, batch["label"]))}

    def measure(model, batch: Batch) -> Metrics:
        logits = model(batch["tokens"], batch["length"])
        return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}

    return Objective(loss, measure)
