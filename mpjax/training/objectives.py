"""The objective of each task: its loss and its metrics as functions of (model, batch), in float32 or wider."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.losses import (
    correct,
    correct_in_top,
    cross_entropy,
    cross_entropy_over,
    dice_loss,
    intersection_and_union,
    soft_cross_entropy,
)


if TYPE_CHECKING:  # a loop of one's own needs neither settings nor data sets
    from mpjax.config.choices import TaskName


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
Sums = Mapping[str, np.ndarray]


def means(sums: Sums) -> dict[str, float]:
    """Divides each sum by `count`, the number of examples."""
    return {name: float(total / sums["count"]) for name, total in sums.items() if name != "count"}


class Objective(NamedTuple):
    """The loss and the metrics of a task.

    Attributes:
      loss: `(model, batch, key) -> (loss, metrics)`: float32 scalars, means over the batch.
      measure: `(model, batch) -> values`: one float32 [B, ...] array per quantity, to be summed over all examples.
      conclude: a function from these sums over a whole set (float64, with `count`, the number of examples) to metrics.
    """

    loss: Callable[[nnx.Module, Batch, jax.Array], tuple[jax.Array, Metrics]]
    measure: Callable[[nnx.Module, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means


def classification(
    prepare: Callable[[Batch, jax.Array | None], Batch], policy: Policy, *, label_smoothing: float = 0.0
) -> Objective:
    """Returns the objective of image classification.

    Batches are `{"image": [B, H, W, C], "label": integer [B]}`; the model returns logits [B, num_classes].

    Args:
      prepare: `(batch, key) -> batch`, with float32 images, augmented if the key is not None; mixed images come with a
        `target`, float32 [B, num_classes].
      policy: the policy whose compute dtype the images are cast to; they are cast nowhere else.
      label_smoothing: the label smoothing of the training loss.
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
    """Returns `accuracy`, and `top5` if there are more than ten classes, both float32 [B]."""
    found = {"accuracy": correct(logits, labels)}
    return found | ({"top5": correct_in_top(5, logits, labels)} if logits.shape[-1] > 10 else {})


def text_classification(*, label_smoothing: float = 0.0) -> Objective:
    """Returns the objective of text classification.

    Batches hold `tokens`, integer [B, T], `length`, integer [B], and `label`, integer [B]. The model takes tokens and
    lengths, and returns logits [B, num_classes].

    Args:
      label_smoothing: the label smoothing of the training loss.
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


def language_modeling(*, label_smoothing: float = 0.0) -> Objective:
    """Returns the objective of language modeling.

    Batches hold `tokens`, integer [B, T + 1]. The model takes the first T and returns logits [B, T, vocabulary].

    Args:
      label_smoothing: the label smoothing of the training loss.
    """

    def losses_and_hits(model, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        tokens, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model(tokens)
        losses = cross_entropy(logits, following, label_smoothing=smoothing)
        return losses, (jnp.argmax(logits, axis=-1) == following).astype(jnp.float32)

    def loss(model, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        del key  # nothing is augmented
        losses, hits = losses_and_hits(model, batch, label_smoothing)
        return jnp.mean(losses), {"accuracy": jnp.mean(hits)}

    def measure(model, batch: Batch) -> Metrics:
        losses, hits = losses_and_hits(model, batch, 0.0)
        return {"loss": jnp.mean(losses, axis=1), "accuracy": jnp.mean(hits, axis=1)}

    return Objective(loss, measure, _conclude_text)


def _conclude_text(sums: Sums) -> dict[str, float]:
    """Computes `loss` and `accuracy`, means over tokens (examples have equal lengths), and `perplexity`, exp(loss)."""
    loss, accuracy = (float(sums[name] / sums["count"]) for name in ("loss", "accuracy"))
    with np.errstate(over="ignore"):
        return {"loss": loss, "accuracy": accuracy, "perplexity": float(np.exp(np.float64(loss)))}


def segmentation(prepare: Callable[[Batch, jax.Array | None], Batch], policy: Policy) -> Objective:
    """Returns the objective of segmentation.

    Batches are `{"image": [B, H, W, C], "mask": integer [B, H, W]}`; the model returns logits [B, H, W, num_classes].
    The loss is the sum of cross entropy and Dice loss, as in nnU-Net (Isensee et al., 2018, arXiv:1809.10486).

    Args:
      prepare: `(batch, key) -> batch`, with float32 images; images and masks augmented alike if the key is not None.
      policy: the policy whose compute dtype the images are cast to; they are cast nowhere else.
    """
    from mpjax.data.fields import IGNORED  # late: other objectives need no data set's packages

    def logits_and_mask(model, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        batch = prepare(batch, key)
        return model(policy.cast_to_compute(batch["image"])), batch["mask"]

    def losses(logits: jax.Array, mask: jax.Array) -> jax.Array:
        return cross_entropy_over(logits, mask, ignore=IGNORED) + dice_loss(logits, mask, ignore=IGNORED)

    def counts(logits: jax.Array, mask: jax.Array) -> Metrics:
        """Counts pixels of each example, float32 [B] or [B, num_classes]."""
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

    return Objective(loss, measure, functools.partial(_conclude_masks, ignored=IGNORED))


def _conclude_masks(sums: Sums, *, ignored: int) -> dict[str, float]:
    """Computes `loss`, a mean over examples, `accuracy`, over pixels, and `iou`, over the classes that occur.

    Raises:
      UsageError: every pixel has the ignored label.
    """
    if not sums["counted"]:
        raise UsageError(f"mask: every pixel of the set is {ignored}, the ignored label; wanted classes from 0")
    return {
        **means({"loss": sums["loss"], "count": sums["count"]}),
        "accuracy": float(sums["right"] / sums["counted"]),
        "iou": float(mean_iou(sums["intersection"], sums["union"], np)),
    }


def mean_iou(intersection, union, xp):
    """Averages intersection / union over the classes with `union` > 0; both are [num_classes] arrays of `xp`."""
    occurs = union > 0
    shares = xp.where(occurs, intersection / xp.where(occurs, union, 1), 0)
    return xp.sum(shares) / xp.maximum(xp.sum(occurs.astype(union.dtype)), 1)


def objective_of(
    task: "TaskName",
    prepare: Callable[[Batch, jax.Array | None], Batch],
    policy: Policy,
    *,
    label_smoothing: float = 0.0,
) -> Objective:
    """Returns the objective of a task.

    Args:
      task: the task.
      prepare: as in `classification`.
      policy: casts the images to its compute dtype.
      label_smoothing: label smoothing, for training only.
    """
    if task == "segmentation":
        return segmentation(prepare, policy)
    if task == "text_classification":
        return text_classification(label_smoothing=label_smoothing)
    if task == "language_modeling":
        return language_modeling(label_smoothing=label_smoothing)
    return classification(prepare, policy, label_smoothing=label_smoothing)
