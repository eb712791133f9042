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
from mpjax.training.cross_entropy import in_chunks, predicted
from mpjax.training.losses import (
    correct,
    correct_in_top,
    cross_entropy,
    cross_entropy_over,
    dice_loss,
    intersection_and_union,
    soft_cross_entropy,
)
from mpjax.training.mean import Mean, mean_of
from mpjax.training.views import Predict, once


if TYPE_CHECKING:  # a loop of one's own needs neither settings nor data sets
    from mpjax.config.choices import TaskName


Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
Means = dict[str, Mean]
Sums = Mapping[str, np.ndarray]


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
      values_of: `(model, batch) -> values` of a prepared batch: one float32 [B, ...] array per quantity, to be summed
        over all examples.
      conclude: a function from these sums over a whole set (float64, with `count`, the number of examples) to metrics.
    """

    prepare: Callable[[Batch, jax.Array | None], Batch]
    loss_of: Callable[[nnx.Module, Batch, jax.Array], tuple[Mean, Means]]
    values_of: Callable[[nnx.Module, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means

    def loss(self, model: nnx.Module, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        """Computes the loss and the metrics of a batch as it is stored."""
        return self.loss_of(model, self.prepare(batch, key), key)

    def measure(self, model: nnx.Module, batch: Batch) -> Metrics:
        """Computes the quantities to sum up, of a batch as it is stored."""
        return self.values_of(model, self.prepare(batch, None))


def _as_stored(batch: Batch, key: jax.Array | None) -> Batch:
    del key  # nothing is augmented
    return batch


def classification(
    prepare: Callable[[Batch, jax.Array | None], Batch],
    policy: Policy,
    *,
    label_smoothing: float = 0.0,
    predict: Predict = once,
) -> Objective:
    """Returns the objective of image classification.

    Batches are `{"image": [B, H, W, C], "label": integer [B]}`; the model returns logits [B, num_classes].

    Args:
      prepare: `(batch, key) -> batch`, with float32 images, augmented if the key is not None; mixed images come with a
        `target`, float32 [B, num_classes].
      policy: the policy whose compute dtype the images are cast to; they are cast nowhere else.
      label_smoothing: the label smoothing of the training loss.
      predict: `(model, images) -> logits` in evaluation, where the logits of several views may be averaged.
    """

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # the batch is augmented already
        logits = model(policy.cast_to_compute(batch["image"]))
        if "target" in batch:
            target = batch["target"]
            smooth = (1 - label_smoothing) * target + label_smoothing / target.shape[-1]
            losses = soft_cross_entropy(logits, smooth)
        else:
            losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(correct(logits, batch["label"]))}

    def measure(model, batch: Batch) -> Metrics:
        logits = predict(model, policy.cast_to_compute(batch["image"]))
        return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}

    return Objective(prepare, loss, measure)


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

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # nothing is augmented
        logits = model(batch["tokens"], batch["length"])
        losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(correct(logits, batch["label"]))}

    def measure(model, batch: Batch) -> Metrics:
        logits = model(batch["tokens"], batch["length"])
        return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}

    return Objective(_as_stored, loss, measure)


def language_modeling(*, label_smoothing: float = 0.0, chunk: int = 0) -> Objective:
    """Returns the objective of language modeling.

    Batches hold `tokens`, integer [B, T + 1]. The model takes the first T and returns logits [B, T, vocabulary].

    Args:
      label_smoothing: the label smoothing of the training loss.
      chunk: the number of tokens whose logits exist at a time, for models with the methods `features` and `logits`, as
        `mpjax.models.GPT2` has; 0: all.
    """

    def losses_and_hits(model, batch: Batch, smoothing: float) -> tuple[jax.Array, jax.Array]:
        tokens, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def of_logits(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses = cross_entropy(logits, labels, label_smoothing=smoothing)
            return losses, (predicted(logits) == labels).astype(jnp.float32)

        if not chunk:
            return of_logits(model(tokens), following)
        features = model.features(tokens)
        losses, hits = in_chunks(lambda x, labels: of_logits(model.logits(x), labels), chunk, features, following)
        return losses, hits

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # nothing is augmented
        losses, hits = losses_and_hits(model, batch, label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(hits)}

    def measure(model, batch: Batch) -> Metrics:
        losses, hits = losses_and_hits(model, batch, 0.0)
        return {"loss": jnp.mean(losses, axis=1), "accuracy": jnp.mean(hits, axis=1)}

    return Objective(_as_stored, loss, measure, _conclude_text)


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

    def logits_of(model, batch: Batch) -> jax.Array:
        return model(policy.cast_to_compute(batch["image"]))

    def losses(logits: jax.Array, mask: jax.Array) -> jax.Array:
        return cross_entropy_over(logits, mask, ignore=IGNORED) + dice_loss(logits, mask, ignore=IGNORED)

    def counts(logits: jax.Array, mask: jax.Array) -> Metrics:
        """Counts pixels of each example, float32 [B] or [B, num_classes]."""
        intersection, union = intersection_and_union(logits, mask, ignore=IGNORED)
        counted = jnp.sum(mask != IGNORED, axis=(1, 2)).astype(jnp.float32)
        right = jnp.sum(intersection, axis=-1)
        return {"right": right, "counted": counted, "intersection": intersection, "union": union}

    def loss(model, batch: Batch, key: jax.Array) -> tuple[Mean, Means]:
        del key  # the batch is augmented already
        logits, mask = logits_of(model, batch), batch["mask"]
        total = {name: jnp.sum(count, axis=0) for name, count in counts(logits, mask).items()}
        metrics = {
            "accuracy": Mean(total["right"], total["counted"]),
            "iou": Mean(total["intersection"], total["union"]),
        }
        return mean_of(losses(logits, mask)), metrics

    def measure(model, batch: Batch) -> Metrics:
        logits, mask = logits_of(model, batch), batch["mask"]
        return {"loss": losses(logits, mask), **counts(logits, mask)}

    return Objective(prepare, loss, measure, functools.partial(_conclude_masks, ignored=IGNORED))


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
    prepare: Callable[[Batch, jax.Array | None], Batch],
    policy: Policy,
    *,
    label_smoothing: float = 0.0,
    chunk: int = 0,
    predict: Predict = once,
) -> Objective:
    """Returns the objective of a task.

    Args:
      task: the task.
      prepare: as in `classification`.
      policy: casts the images to its compute dtype.
      label_smoothing: label smoothing, for training only.
      chunk: as in `language_modeling`.
      predict: as in `classification`.
    """
    if task == "segmentation":
        return segmentation(prepare, policy)
    if task == "text_classification":
        return text_classification(label_smoothing=label_smoothing)
    if task == "language_modeling":
        return language_modeling(label_smoothing=label_smoothing, chunk=chunk)
    return classification(prepare, policy, label_smoothing=label_smoothing, predict=predict)
