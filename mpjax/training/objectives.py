"""The objective of each task: its loss and its metrics as functions of (model, batch), in float32 or wider."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.cross_entropy import in_chunks, with_labels
from mpjax.training.losses import (
    correct,
    correct_in_top,
    cross_entropy,
    cross_entropy_over,
    dice_loss,
    intersection_and_union,
    soft_cross_entropy,
)
from mpjax.training.objective import Batch, Mean, Means, Metrics, Objective, Prepare, Sums, as_stored, mean_of, means
from mpjax.training.views import Predict, once


class LabelLoss(NamedTuple):
    """Losses and scores of logits [B, num_classes] against the labels of a batch.

    Attributes:
      in_training: `(logits, batch) -> (loss, metrics)`; the batch may have a `target` of mixed images, float32 [B,
        num_classes], beside its `label`.
      in_evaluation: `(logits, batch) -> values`, float32 [B] each, without label smoothing.
      conclude: maps the sums of these values over a whole set to metrics.
    """

    in_training: Callable[[jax.Array, Batch], tuple[Mean, Means]]
    in_evaluation: Callable[[jax.Array, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means


def equally(label_smoothing: float) -> LabelLoss:
    """Creates the comparison that weights all examples and classes equally."""

    def in_training(logits: jax.Array, batch: Batch) -> tuple[Mean, Means]:
        if "target" in batch:
            target = batch["target"]
            smooth = (1 - label_smoothing) * target + label_smoothing / target.shape[-1]
            losses = soft_cross_entropy(logits, smooth)
        else:
            losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(correct(logits, batch["label"]))}

    return LabelLoss(in_training, _values)


def _values(logits: jax.Array, batch: Batch) -> Metrics:
    return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}


def scores(logits: jax.Array, labels: jax.Array) -> Metrics:
    """Computes `accuracy`, and `top5` if there are more than ten classes, both float32 [B]."""
    found = {"accuracy": correct(logits, labels)}
    return found | ({"top5": correct_in_top(5, logits, labels)} if logits.shape[-1] > 10 else {})


if TYPE_CHECKING:  # the objectives need neither settings nor data sets at run time
    from mpjax.config.choices import TaskName


PixelLoss = Callable[..., jax.Array]
"""`(logits, mask, *, ignore) -> losses`, float32 [B], like `losses.cross_entropy_over`."""


def classification(
    prepare: Prepare,
    policy: Policy,
    *,
    label_smoothing: float = 0.0,
    predict: Predict = once,
    comparison: LabelLoss | None = None,
) -> Objective:
    """Creates the objective of image classification.

    Batches are `{"image": [B, H, W, C], "label": integer [B]}`; the model returns logits [B, num_classes].

    Args:
      prepare: `(batch, key) -> batch`, with float32 images, augmented if the key is not None; mixed images come with a
        `target`, float32 [B, num_classes].
      policy: the policy whose compute dtype the images are cast to; no other code casts them.
      label_smoothing: the label smoothing of the training loss.
      predict: `(model, images) -> logits` in evaluation, where the logits of several views may be averaged.
      comparison: the losses and scores, such as `class_weights.by_class`, with its own smoothing; None: equal weights
        for all classes.
    """
    comparison = comparison or equally(label_smoothing)

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # `prepare` used it to augment the batch
        logits = model(policy.cast_to_compute(batch["image"]))
        return comparison.in_training(logits, batch)

    def predicted_by(model, batch: Batch) -> jax.Array:
        return predict(model, policy.cast_to_compute(batch["image"]))

    return Objective(prepare, loss, predicted_by, comparison.in_evaluation, comparison.conclude)


def text_classification(
    *, prepare: Prepare = as_stored, label_smoothing: float = 0.0, comparison: LabelLoss | None = None
) -> Objective:
    """Creates the objective of text classification.

    Batches hold `tokens`, integer [B, T], `length`, integer [B], and `label`, integer [B]. The model takes tokens and
    lengths, and returns logits [B, num_classes].

    Args:
      prepare: `(batch, key) -> batch`, which augments if the key is not None.
      label_smoothing: the label smoothing of the training loss.
      comparison: as in `classification`.
    """
    comparison = comparison or equally(label_smoothing)

    def logits_of(model, batch: Batch) -> jax.Array:
        return model(batch["tokens"], batch["length"])

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # the loss draws no random numbers
        return comparison.in_training(logits_of(model, batch), batch)

    return Objective(prepare, loss, logits_of, comparison.in_evaluation, comparison.conclude)


def language_modeling(*, prepare: Prepare = as_stored, label_smoothing: float = 0.0, chunk: int = 0) -> Objective:
    """Creates the objective of language modeling.

    Batches hold `tokens`, integer [B, T + 1]. The model takes the first T and returns logits [B, T, vocabulary].

    Args:
      prepare: `(batch, key) -> batch`, which augments if the key is not None.
      label_smoothing: the label smoothing of the training loss.
      chunk: the number of tokens whose logits exist at a time, for models with the methods `features` and `logits`,
        such as `mpjax.models.GPT2`; 0: all.
    """

    def of_logits(smoothing: float, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, hits = with_labels(smoothing, logits, labels)
        return losses, hits.astype(jnp.float32)

    def logits_of(model, batch: Batch) -> jax.Array:
        return model(batch["tokens"][:, :-1])

    def whole(model, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        return of_logits(smoothing, logits_of(model, batch), batch["tokens"][:, 1:])

    def chunked(model, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        def of_features(x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
            return of_logits(smoothing, model.logits(x), labels)

        features = model.features(batch["tokens"][:, :-1])
        losses, hits = in_chunks(of_features, chunk, features, batch["tokens"][:, 1:])
        return losses, hits

    losses_and_hits = chunked if chunk else whole

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # the loss draws no random numbers
        losses, hits = losses_and_hits(model, batch, label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(hits)}

    def values(losses: jax.Array, hits: jax.Array) -> Metrics:
        return {"loss": jnp.mean(losses, axis=1), "accuracy": jnp.mean(hits, axis=1)}

    def of_all_logits(logits: jax.Array, batch: Batch) -> Metrics:
        return values(*of_logits(0.0, logits, batch["tokens"][:, 1:]))

    if not chunk:
        return Objective(prepare, loss, logits_of, of_all_logits, _conclude_text)
    outputs_of = functools.partial(chunked, smoothing=0.0)  # losses instead of logits, which never exist as a whole
    return Objective(prepare, loss, outputs_of, lambda found, batch: values(*found), _conclude_text)


def _conclude_text(sums: Sums) -> dict[str, float]:
    """Computes `loss` and `accuracy`, means over tokens (examples have equal lengths), and `perplexity`, exp(loss)."""
    loss, accuracy = (float(sums[name] / sums["count"]) for name in ("loss", "accuracy"))
    with np.errstate(over="ignore"):
        return {"loss": loss, "accuracy": accuracy, "perplexity": float(np.exp(np.float64(loss)))}


def segmentation(prepare: Prepare, policy: Policy, *, pixel_loss: PixelLoss = cross_entropy_over) -> Objective:
    """Creates the objective of segmentation.

    Batches are `{"image": [B, H, W, C], "mask": integer [B, H, W]}`; the model returns logits [B, H, W, num_classes].
    The loss is the sum of cross entropy and Dice loss, as in nnU-Net (Isensee et al., 2018, arXiv:1809.10486).

    Args:
      prepare: `(batch, key) -> batch`, with float32 images; a key that is not None augments images and masks together.
      policy: the policy whose compute dtype the images are cast to; no other code casts them.
      pixel_loss: `(logits, mask, *, ignore) -> losses` [B], the cross entropy of each image in training; evaluation
        weights all classes equally.
    """
    from mpjax.data.fields import IGNORED  # local, because other objectives need no packages of data sets

    def logits_of(model, batch: Batch) -> jax.Array:
        return model(policy.cast_to_compute(batch["image"]))

    def losses(of_pixels: PixelLoss, logits: jax.Array, mask: jax.Array) -> jax.Array:
        return of_pixels(logits, mask, ignore=IGNORED) + dice_loss(logits, mask, ignore=IGNORED)

    def counts(logits: jax.Array, mask: jax.Array) -> Metrics:
        """Counts pixels of each example, float32 [B] or [B, num_classes]."""
        intersection, union = intersection_and_union(logits, mask, ignore=IGNORED)
        counted = jnp.sum(mask != IGNORED, axis=(1, 2)).astype(jnp.float32)
        right = jnp.sum(intersection, axis=-1)
        return {"right": right, "counted": counted, "intersection": intersection, "union": union}

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # `prepare` used it to augment the batch
        logits, mask = logits_of(model, batch), batch["mask"]
        total = {name: jnp.sum(count, axis=0) for name, count in counts(logits, mask).items()}
        metrics = {
            "accuracy": Mean(total["right"], total["counted"]),
            "iou": Mean(total["intersection"], total["union"]),
        }
        return mean_of(losses(pixel_loss, logits, mask)), metrics

    def values(logits: jax.Array, batch: Batch) -> Metrics:
        return {"loss": losses(cross_entropy_over, logits, batch["mask"]), **counts(logits, batch["mask"])}

    return Objective(prepare, loss, logits_of, values, functools.partial(_conclude_masks, ignored=IGNORED))


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
        "iou": _mean_iou(sums["intersection"], sums["union"]),
    }


def _mean_iou(intersection: np.ndarray, union: np.ndarray) -> float:
    """Averages intersection / union, float64 [num_classes] each, over the classes that occur."""
    occurs = union > 0
    return float(np.mean(intersection[occurs] / union[occurs])) if occurs.any() else 0.0


def objective_of(
    task: "TaskName",
    prepare: Prepare,
    policy: Policy,
    *,
    label_smoothing: float = 0.0,
    chunk: int = 0,
    predict: Predict = once,
    comparison: LabelLoss | None = None,
    pixel_loss: PixelLoss = cross_entropy_over,
) -> Objective:
    """Creates the objective of a task.

    Args:
      task: the task.
      prepare: as in `classification`.
      policy: casts the images to its compute dtype.
      label_smoothing: label smoothing, for training only.
      chunk: as in `language_modeling`.
      predict: as in `classification`.
      comparison: as in `classification`; also for text classification.
      pixel_loss: as in `segmentation`.
    """
    if task == "segmentation":
        return segmentation(prepare, policy, pixel_loss=pixel_loss)
    if task == "text_classification":
        return text_classification(prepare=prepare, label_smoothing=label_smoothing, comparison=comparison)
    if task == "language_modeling":
        return language_modeling(prepare=prepare, label_smoothing=label_smoothing, chunk=chunk)
    return classification(prepare, policy, label_smoothing=label_smoothing, predict=predict, comparison=comparison)
