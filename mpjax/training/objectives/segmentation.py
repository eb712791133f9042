"""Semantic segmentation: cross entropy plus Dice; mean intersection over union over a whole set."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.data.fields import IGNORED
from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.losses import cross_entropy_over, dice_loss, intersection_and_union
from mpjax.training.objectives.objective import Batch, Metrics, Objective, Sums, means


def segmentation(prepare: Callable[[Batch, jax.Array | None], Batch], policy: Policy) -> Objective:
    """Batches `{"image": [B, H, W, C], "mask": integer [B, H, W]}`, a model that gives logits [B, H, W, num_classes].

    The sum of both losses as in Isensee et al., 2018, nnU-Net (arXiv:1809.10486).

    Args:
      prepare: `(batch, key) -> batch`, with float32 images, images and masks augmented alike if the key is not None.
      policy: casts the images to its compute dtype: the one place where they are cast.
    """

    def logits_and_mask(model, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        batch = prepare(batch, key)
        return model(policy.cast_to_compute(batch["image"])), batch["mask"]

    def losses(logits: jax.Array, mask: jax.Array) -> jax.Array:
        return cross_entropy_over(logits, mask, ignore=IGNORED) + dice_loss(logits, mask, ignore=IGNORED)

    def counts(logits: jax.Array, mask: jax.Array) -> Metrics:
        """float32 [B] or [B, num_classes] pixels of each example."""
        intersection, union = intersection_and_union(logits, mask, ignore=IGNORED)
        counted = jnp.sum(mask != IGNORED, axis=(1, 2)).astype(jnp.float32)
        right = jnp.sum(intersection, axis=-1)
        return {"right": right, "counted": counted, "intersection": intersection, "union": union}

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        logits, mask = logits_and_mask(model, batch, key)
        total = {name: jnp.sum(count, axis=0) for name, count in counts(logits, mask).items()}
        iou = mean_iou(total["intersection"], total["union"], jnp)
        accuracy = total["right"] / jnp.maximum(total["counted"], 1)
        return jnp.mean(losses(logits, mask)), {"accuracy": accuracy, "iou": iou}

    def measure(model, batch: Batch) -> Metrics:
        logits, mask = logits_and_mask(model, batch, None)
        return {"loss": losses(logits, mask), **counts(logits, mask)}

    return Objective(loss, measure, conclude)


def conclude(sums: Sums) -> dict[str, float]:
    """`loss`, a mean over examples; `accuracy`, over pixels; `iou`, over the classes that occur.

    Raises:
      UsageError: no pixel counts.
    """
    if not sums["counted"]:
        raise UsageError(f"mask: every pixel of the set is {IGNORED}, which does not count; wanted classes from 0")
    return {
        **means({"loss": sums["loss"], "count": sums["count"]}),
        "accuracy": float(sums["right"] / sums["counted"]),
        "iou": float(mean_iou(sums["intersection"], sums["union"], np)),
    }


def mean_iou(intersection, union, xp):
    """The mean over the classes of `union` > 0 of intersection / union, both [num_classes], arrays of `xp`."""
    occurs = union > 0
    shares = xp.where(occurs, intersection / xp.where(occurs, union, 1), 0)
    return xp.sum(shares) / xp.maximum(xp.sum(occurs.astype(union.dtype)), 1)
