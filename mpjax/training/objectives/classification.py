"""Image classification: cross entropy; accuracy, top-5 where there are more than ten classes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mpjax.precision.policy import Policy
from mpjax.training.losses import correct, correct_in_top, cross_entropy, soft_cross_entropy
from mpjax.training.objectives.objective import Batch, Metrics, Objective


def classification(
    prepare: Callable[[Batch, jax.Array | None], Batch], policy: Policy, *, label_smoothing: float = 0.0
) -> Objective:
    """Batches `{"image": [B, H, W, C], "label": integer [B]}`, a model that gives logits [B, num_classes].

    Args:
      prepare: `(batch, key) -> batch`, with float32 images, augmented if the key is not None; images that were mixed
        come with a `target`, float32 [B, num_classes].
      policy: casts the images to its compute dtype: the one place where they are cast.
      label_smoothing: for training only.
    """

    def logits_and_batch(model, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Batch]:
        batch = prepare(batch, key)
        return model(policy.cast_to_compute(batch["image"])), batch

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        logits, batch = logits_and_batch(model, batch, key)
        if "target" in batch:
            target = batch["target"]
            smooth = (1 - label_smoothing) * target + label_smoothing / target.shape[-1]
            losses = soft_cross_entropy(logits, smooth)
        else:
            losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return jnp.mean(losses), {"accuracy": jnp.mean(correct(logits, batch["label"]))}

    def measure(model, batch: Batch) -> Metrics:
        logits, batch = logits_and_batch(model, batch, None)
        return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}

    return Objective(loss, measure)


def scores(logits: jax.Array, labels: jax.Array) -> Metrics:
    """float32 [B]: `accuracy`, and `top5` where there are more than ten classes."""
    found = {"accuracy": correct(logits, labels)}
    return found | ({"top5": correct_in_top(5, logits, labels)} if logits.shape[-1] > 10 else {})
