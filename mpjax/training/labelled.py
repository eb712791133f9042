"""Compares logits with the labels of a batch, for the tasks that have one label per example."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from mpjax.training.losses import correct, correct_in_top, cross_entropy, soft_cross_entropy
from mpjax.training.mean import Mean, mean_of
from mpjax.training.objective import Batch, Means, Metrics, Sums, means


class Comparison(NamedTuple):
    """What is computed from logits [B, num_classes] and the labels of a batch.

    Attributes:
      in_training: `(logits, batch) -> (loss, metrics)`; the batch may have a `target`, float32 [B, num_classes], of
        mixed images beside its `label`.
      in_evaluation: `(logits, batch) -> values`, float32 [B] each, without label smoothing.
      conclude: a function from the sums of these over a whole set to metrics.
    """

    in_training: Callable[[jax.Array, Batch], tuple[Mean, Means]]
    in_evaluation: Callable[[jax.Array, Batch], Metrics]
    conclude: Callable[[Sums], dict[str, float]] = means


def equally(label_smoothing: float) -> Comparison:
    """Returns the comparison in which all examples and classes count alike."""

    def in_training(logits: jax.Array, batch: Batch) -> tuple[Mean, Means]:
        if "target" in batch:
            target = batch["target"]
            smooth = (1 - label_smoothing) * target + label_smoothing / target.shape[-1]
            losses = soft_cross_entropy(logits, smooth)
        else:
            losses = cross_entropy(logits, batch["label"], label_smoothing=label_smoothing)
        return mean_of(losses), {"accuracy": mean_of(correct(logits, batch["label"]))}

    return Comparison(in_training, _values)


def _values(logits: jax.Array, batch: Batch) -> Metrics:
    return {"loss": cross_entropy(logits, batch["label"]), **scores(logits, batch["label"])}


def scores(logits: jax.Array, labels: jax.Array) -> Metrics:
    """Returns `accuracy`, and `top5` if there are more than ten classes, both float32 [B]."""
    found = {"accuracy": correct(logits, labels)}
    return found | ({"top5": correct_in_top(5, logits, labels)} if logits.shape[-1] > 10 else {})
