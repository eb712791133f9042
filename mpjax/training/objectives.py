"""The objectives of the tasks, each an `mpjax.extend.Objective` with the logits of the model as its `outputs`.

A key of None means evaluation, without label smoothing and class weights. Values are [B], but language modeling
returns [B, T] and the `iou` of segmentation [B, num_classes]. A user's objective has to return [B]: another axis is
often a forgotten sum.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.policy import Policy
from mpjax.training.chunked_loss import in_chunks, sums_in_chunks, token_cotangent
from mpjax.training.losses import (
    correct,
    correct_in_top,
    cross_entropy,
    cross_entropy_over,
    dice_loss,
    intersection_and_union,
    soft_cross_entropy,
)
from mpjax.training.objective import OUTPUTS, Batch, Mean, Metrics, Values, inputs_in
from mpjax.training.softmax_cross_entropy import with_labels


if TYPE_CHECKING:  # the protocol of the functions that this module returns
    from mpjax.extend import Objective


Comparison = Callable[[jax.Array, Batch, jax.Array | None], Values]
"""`(logits, batch, key) -> values` for logits [B, num_classes]: the loss and the metrics of each example.

A training batch of mixed images also has their mixed labels, `target`, float32 [B, num_classes]."""

PixelLoss = Callable[..., jax.Array]
"""`(logits, mask, *, ignore) -> losses`, float32 [B], like `losses.cross_entropy_over`."""


def equally(label_smoothing: float = 0.0) -> Comparison:
    """Creates the comparison `(logits, batch, key) -> values`, without weights of classes.

    In training it computes `loss` and `accuracy`, [B] each; the loss is smoothed by `label_smoothing`, and compares
    with the mixed labels `target` if the batch has them. In evaluation, when the key is None, it computes the values of
    `evaluated`, without smoothing.
    """

    def compare(logits: jax.Array, batch: Batch, key: jax.Array | None) -> Values:
        labels = batch["label"]
        if key is None:
            return evaluated(logits, labels)
        if "target" in batch:
            target = batch["target"]
            smooth = (1 - label_smoothing) * target + label_smoothing / target.shape[-1]
            losses = soft_cross_entropy(logits, smooth)
        else:
            losses = cross_entropy(logits, labels, label_smoothing=label_smoothing)
        return {"loss": losses, "accuracy": correct(logits, labels)}

    return compare


def evaluated(logits: jax.Array, labels: jax.Array) -> Metrics:
    """Computes `loss`, `accuracy`, and `top5` if there are more than ten classes, all float32 [B]."""
    values = {"loss": cross_entropy(logits, labels), "accuracy": correct(logits, labels)}
    return values | ({"top5": correct_in_top(5, logits, labels)} if logits.shape[-1] > 10 else {})


def classification(policy: Policy, compare: Comparison | None = None) -> "Objective":
    """Creates the objective of classification of images or rows: the values of `compare`, and the logits as `outputs`.

    Batches are `{"image": float32 [B, H, W, C], "label": integer [B]}`, or have a `row`, float32 [B, F], in place of
    the image; the model returns logits [B, num_classes].

    Args:
      policy: the policy whose compute dtype the inputs are cast to; no other code casts them.
      compare: the comparison of logits and labels, such as `class_weights.by_class`; None: `equally()`.
    """
    compare = compare or equally()

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        logits = model(*inputs_in(batch, "classification", policy))
        return {**compare(logits, batch, key), OUTPUTS: logits}

    return objective


def text_classification(compare: Comparison | None = None) -> "Objective":
    """Creates the objective of text classification: the values of `compare`, and the logits as `outputs`.

    Batches hold `tokens`, integer [B, T], `length`, integer [B], and `label`, integer [B]. The model takes tokens and
    lengths, and returns logits [B, num_classes]. `compare` is as in `classification`.
    """
    compare = compare or equally()

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        logits = model(batch["tokens"], batch["length"])
        return {**compare(logits, batch, key), OUTPUTS: logits}

    return objective


def language_modeling(*, label_smoothing: float = 0.0, chunk: int = 0) -> "Objective":
    """Creates the objective of language modeling: `loss` and `accuracy` [B, T] of each predicted token.

    Batches hold `tokens`, integer [B, T + 1]. The model takes the first T and returns logits [B, T, vocabulary], which
    are the `outputs`. With a `chunk`, there are no `outputs`, and in training `loss` and `accuracy` are each a `Mean`
    of all tokens, [1].

    Args:
      label_smoothing: the label smoothing of the training loss.
      chunk: the number of tokens whose logits exist at a time, for models with the methods `features` and `logits`,
        such as `mpjax.models.GPT2`; 0: all tokens.
    """

    from mpjax.models.transformer import context_of  # local, because other objectives read no positions

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        own = context_of(model).own
        tokens, labels = own(batch["tokens"][:, :-1]), own(batch["tokens"][:, 1:])
        smoothing = 0.0 if key is None else label_smoothing

        def compare(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, hits = with_labels(smoothing, logits, labels)
            return losses, hits.astype(jnp.float32)

        features: Any = None
        balance: Any = None
        factor = 0.0 if key is None else getattr(model, "balance", 0.0)  # of the load-balancing loss of experts
        if factor:
            from mpjax.training.expert_balance import features_and_balance  # local, as few models have experts

            features, balance = features_and_balance(model, tokens, jnp.ones(labels.shape, bool))
        elif chunk:
            features = model.features(tokens)
        if chunk:

            def of_chunk(features: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
                return compare(model.logits(features), labels)

            if key is None:
                losses, hits = in_chunks(of_chunk, chunk, features, labels)
                return {"loss": losses, "accuracy": hits}
            sums = sums_in_chunks(of_chunk, chunk, features, labels, unit=token_cotangent(labels.size))
            loss, accuracy = (Mean(x[None], jnp.full((1,), labels.size, x.dtype)) for x in sums)
            if factor:
                loss = Mean(loss.total + factor * balance.total, loss.weight)
                return {"loss": loss, "accuracy": accuracy, "router_loss": balance}
            return {"loss": loss, "accuracy": accuracy}
        if factor:
            losses, hits = compare(model.logits(features), labels)
            losses = losses + factor * balance.value  # the mean of a batch grows by it
            return {"loss": losses, "accuracy": hits, "router_loss": balance}
        logits = model(tokens)
        losses, hits = compare(logits, labels)
        return {"loss": losses, "accuracy": hits, OUTPUTS: logits}

    return objective


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Adds `perplexity`, exp(loss), to the metrics of a set; inf if it is too large for float64.

    The loss is a mean over tokens: examples have equal lengths, or weights (`instructions`). The result is a new dict
    with `loss`, `accuracy` and `perplexity` first. A metric `perplexity` of the user is kept.
    """
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(np.float64(metrics["loss"])))
    return {"loss": metrics["loss"], "accuracy": metrics["accuracy"], "perplexity": perplexity} | metrics


def segmentation(policy: Policy, *, pixel_loss: PixelLoss = cross_entropy_over) -> "Objective":
    """Creates the objective of segmentation.

    Batches are `{"image": float32 [B, H, W, C], "mask": integer [B, H, W]}`; the model returns logits [B, H, W,
    num_classes], which are the `outputs`. `loss` [B] is the sum of cross entropy and Dice loss, as in nnU-Net (Isensee
    et al., 2018, arXiv:1809.10486). `accuracy` is a mean over pixels, and `iou` a mean over the classes that occur.
    Pixels with the label 255 do not count.

    Args:
      policy: the policy whose compute dtype the images are cast to; no other code casts them.
      pixel_loss: `(logits, mask, *, ignore) -> losses` [B], the cross entropy of each image in training.
    """
    from mpjax.data.fields import IGNORED  # local, because other objectives need no packages of data sets

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        logits, mask = model(policy.cast_to_compute(batch["image"])), batch["mask"]
        entropy = cross_entropy_over if key is None else pixel_loss
        intersection, union = intersection_and_union(logits, mask, ignore=IGNORED)
        counted = jnp.sum(mask != IGNORED, axis=(1, 2)).astype(jnp.float32)
        return {
            "loss": entropy(logits, mask, ignore=IGNORED) + dice_loss(logits, mask, ignore=IGNORED),
            "accuracy": Mean(jnp.sum(intersection, axis=-1), counted),
            "iou": Mean(intersection, union),
            OUTPUTS: logits,
        }

    return objective


def require_pixels(metrics: dict[str, float]) -> dict[str, float]:
    """Checks that a pixel of the set counts, and copies the metrics in order: `loss`, `accuracy`, `iou`, then others.

    Raises:
      UsageError: every pixel of the set has the ignored label.
    """
    if math.isnan(metrics["accuracy"]):
        raise UsageError("mask: every pixel of the set is 255, the ignored label; wanted classes from 0")
    return {name: metrics[name] for name in ("loss", "accuracy", "iou")} | metrics
