"""Losses with a weight for each class, and with labels that are ignored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.data.fields import IGNORED_LABEL
from mpjax.errors import UsageError
from mpjax.training.losses import correct
from mpjax.training.objective import Batch, Mean, Values
from mpjax.training.objectives import Comparison, evaluated
from mpjax.training.softmax_cross_entropy import as_float32


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


def weighted_cross_entropy(
    logits: Float[Array, "*S K"],
    targets: Float[Array, "*S K"],
    weights: Float[Array, " K"],
    *,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Computes the cross entropy of each example, weighted by class, and the weight of each example.

    The sum of the losses divided by the sum of the weights is `torch.nn.CrossEntropyLoss(weight, label_smoothing)` with
    class numbers as targets. For mixed targets torch divides by the number of examples. Here an example has the mean
    weight of its mixed classes.

    Args:
      logits: floating [..., num_classes].
      targets: floating [..., num_classes]: 1 for the class, fractions of mixed classes, or all 0 for an ignored label.
      weights: floating [num_classes], at least 0.
      label_smoothing: the fraction of the target that is spread evenly over all classes; each class keeps its weight
        there.

    Returns:
      The weighted losses, and the weight of each example, which label smoothing does not change; both float32 (or
        wider) [...]. Both are 0 where all targets are 0.
    """
    logits = as_float32(logits)
    targets, weights = targets.astype(logits.dtype), jnp.broadcast_to(weights.astype(logits.dtype), logits.shape)
    there = jnp.sum(targets, axis=-1, keepdims=True)  # less than 1 where an ignored label is mixed in
    smooth = (1 - label_smoothing) * targets + label_smoothing / logits.shape[-1] * there
    weighted_targets = smooth * weights
    losses = -jnp.sum(jnp.where(weighted_targets != 0, weighted_targets * jax.nn.log_softmax(logits), 0), axis=-1)
    return losses, jnp.sum(targets * weights, axis=-1)


def by_class(weights: Sequence[float], label_smoothing: float, *, ignores: bool) -> Comparison:
    """Creates a comparison `(logits, batch, key) -> values` whose training loss weights each class.

    Each value is a `Mean` with one entry for each example. In training the values are `loss` and `accuracy`; a loss is
    NaN where the label is no class. In evaluation they are those of `evaluated`, without class weights and label
    smoothing.

    Args:
      weights: the weight of each class; empty: 1 for all.
      label_smoothing: the label smoothing of the training loss.
      ignores: True if labels may be `IGNORED_LABEL`; such examples have weight 0 in all values.
    """

    def compare(logits: jax.Array, batch: Batch, key: jax.Array | None) -> Values:
        labels, classes = batch["label"], logits.shape[-1]
        counts = (labels != IGNORED_LABEL).astype(jnp.float32) if ignores else jnp.ones(labels.shape, jnp.float32)
        if key is None:
            values = evaluated(logits, jnp.where(counts > 0, labels, 0))
            return {name: Mean(jnp.where(counts > 0, value, 0), counts) for name, value in values.items()}
        target = batch["target"] if "target" in batch else jax.nn.one_hot(labels, classes, dtype=jnp.float32)
        of_classes = jnp.asarray(weights or (1.0,) * classes, jnp.float32)
        losses, counted = weighted_cross_entropy(logits, target, of_classes, label_smoothing=label_smoothing)
        known = (labels >= 0) & (labels < classes) | (ignores & (labels == IGNORED_LABEL))
        losses = jnp.where(known, losses, jnp.nan)  # as in the loss without weights
        return {"loss": Mean(losses, counted), "accuracy": Mean(correct(logits, labels), counts)}

    return compare


def require_counted(metrics: dict[str, float]) -> dict[str, float]:
    """Checks that at least one example of a set counts, so that accuracy is not NaN; returns the metrics unchanged.

    Raises:
      UsageError: all examples are ignored.
    """
    if math.isnan(metrics["accuracy"]):
        raise UsageError("label: every example of the set is ignored by --data.ignore_index; wanted some that are not")
    return metrics


def pixels_by_class(
    weights: Sequence[float], logits: Float[Array, "B *S K"], labels: Int[Array, " B *S"], *, ignore: int
) -> Float[Array, " B"]:
    """Computes the cross entropy of each image: the weighted sum over its pixels divided by the sum of their weights.

    It is `torch.nn.CrossEntropyLoss(weight, ignore_index)` of one image. A weight is relative to the other classes of
    the same image, and all images have equal weight.

    Args:
      weights: the weight of each class, at least 0.
      logits: floating [B, ..., num_classes].
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      ignore: the label of positions to leave out.

    Returns:
      float32 (or wider) [B]; 0 for an image whose pixels are all ignored or have weight 0; NaN if a label is out of
        range.
    """
    labels = labels.astype(jnp.int32)
    targets = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    losses, counted = weighted_cross_entropy(logits, targets, jnp.asarray(weights, jnp.float32))
    known = (labels >= 0) & (labels < logits.shape[-1]) | (labels == ignore)
    places = tuple(range(1, labels.ndim))
    total, weight = jnp.sum(jnp.where(known, losses, jnp.nan), axis=places), jnp.sum(counted, axis=places)
    return total / jnp.where(weight > 0, weight, 1)
