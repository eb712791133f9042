"""Losses and scores per example, computed in float32 or wider for logits of any dtype.

In shapes, B is the batch and ... are the labelled positions of an example, such as H, W or T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.training.softmax_cross_entropy import as_float32, predicted, with_labels


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Num


def cross_entropy(
    logits: Float[Array, "B K"], labels: Int[Array, " B"], *, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
    """Computes the softmax cross entropy of each example.

    Args:
      logits: floating [B, num_classes].
      labels: integer [B].
      label_smoothing: the fraction of the target, from 0 to 1, that is spread evenly over all classes (Szegedy et al.,
        2015, arXiv:1512.00567).

    Returns:
      float32 (or wider) [B]; NaN where a label is outside [0, num_classes).
    """
    return with_labels(label_smoothing, logits, labels)[0]


def soft_cross_entropy(logits: Float[Array, "B K"], targets: Float[Array, "B K"]) -> Float[Array, " B"]:
    """Computes the softmax cross entropy of each example with a target distribution, such as for mixed images.

    Args:
      logits: floating [B, num_classes].
      targets: floating [B, num_classes], rows that sum to 1.

    Returns:
      float32 (or wider) [B]. A class with a target of 0 adds 0, also if its logit is -inf.
    """
    logits = as_float32(logits)
    terms = jnp.where(targets == 0, 0, targets.astype(logits.dtype) * jax.nn.log_softmax(logits))
    return -jnp.sum(terms, axis=-1)


def cross_entropy_over(
    logits: Float[Array, "B *S K"], labels: Int[Array, " B *S"], *, ignore: int | None = None
) -> Float[Array, " B"]:
    """Computes the softmax cross entropy of each example, averaged over its pixels or other labelled positions.

    Args:
      logits: floating [B, ..., num_classes].
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      ignore: the label of positions to leave out, such as 255; None counts all positions.

    Returns:
      float32 (or wider) [B]; 0 for an example without counted positions; NaN if a counted label is out of range.
    """
    total, count = masked_cross_entropy(logits, labels, _counts(labels, ignore))
    return total / jnp.maximum(count, 1)


def masked_cross_entropy(
    logits: Float[Array, "B *S K"], labels: Int[Array, " B *S"], mask: Num[Array, " B *S"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Computes the softmax cross entropy of each example, summed over its tokens, and the number of tokens.

    The loss of a language model is the total of the sums divided by the total of the counts. `perplexity` takes both.

    >>> total, count = masked_cross_entropy(jnp.zeros((1, 3, 2)), jnp.array([[0, 1, 0]]), jnp.array([[1, 1, 0]]))
    >>> total, count
    (Array([1.3862944], dtype=float32), Array([2.], dtype=float32))
    >>> perplexity(total, count)
    Array([2.], dtype=float32)

    Args:
      logits: floating [B, ..., num_classes].
      labels: integer [B, ...]; any value where the mask is 0.
      mask: bool, integer or floating [B, ...]; nonzero at counted positions.

    Returns:
      The sums and the counts, both float32 (or wider) [B]; a sum is NaN if a counted label is out of range.
    """
    counts = mask.astype(bool)
    # A masked label may be outside the classes. Its NaN is masked out below, but `jax_debug_nans` would raise.
    nll, _ = with_labels(0.0, logits, jnp.where(counts, labels, 0))
    places = tuple(range(1, labels.ndim))
    return jnp.sum(jnp.where(counts, nll, 0), axis=places), _count(counts).astype(nll.dtype)


def perplexity(total: jax.Array, count: jax.Array) -> jax.Array:
    """Computes exp(total / count) of sums from `masked_cross_entropy`; inf for a mean above 88.7 in float32.

    Without tokens, when total and count are 0, it is 1.
    """
    return jnp.exp(total / jnp.maximum(count, 1))


def dice_loss(
    logits: Float[Array, "B *S K"], labels: Int[Array, " B *S"], *, smooth: float = 1.0, ignore: int | None = None
) -> Float[Array, " B"]:
    """Computes one minus the soft Dice coefficient of each example, averaged over classes.

    Milletari et al., 2016 (arXiv:1606.04797), equation in section 3: 2 sum(p g) / (sum(p^2) + sum(g^2)). Here `smooth`
    is added to numerator and denominator, so a class that is neither present nor predicted adds no loss.

    Args:
      logits: floating [B, ..., num_classes], before the softmax.
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      smooth: the added constant in pixels, above 0.
      ignore: the label of positions to leave out; None counts all positions.

    Returns:
      float32 (or wider) [B], from 0 to below 1. A label out of range counts for no class.
    """
    logits = as_float32(logits)
    counts = _counts(labels, ignore)[..., None]
    places = tuple(range(1, labels.ndim))
    probabilities = jnp.where(counts, jax.nn.softmax(logits), 0)
    targets = jnp.where(counts, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), 0)
    overlap = jnp.sum(probabilities * targets, axis=places)
    size = jnp.sum(jnp.square(probabilities), axis=places) + jnp.sum(jnp.square(targets), axis=places)
    return 1 - jnp.mean((2 * overlap + smooth) / (size + smooth), axis=-1)


def correct(logits: Float[Array, "B K"], labels: Int[Array, " B"]) -> Float[Array, " B"]:
    """1 where the label's logit is the largest, else 0; among equal logits the first ranks higher.

    >>> correct(jnp.array([[1.0, 3.0, 2.0], [1.0, jnp.nan, 3.0]]), jnp.array([1, 2]))
    Array([1., 0.], dtype=float32)

    Args:
      logits: floating [B, num_classes].
      labels: integer [B].

    Returns:
      float32 [B]; 0 where a logit is NaN or inf, or all are -inf, and where the label is outside [0, num_classes).
    """
    labels = labels.astype(jnp.int32)
    return ((predicted(logits) == labels) & (labels < logits.shape[-1])).astype(jnp.float32)


def correct_in_top(k: int, logits: Float[Array, "B K"], labels: Int[Array, " B"]) -> Float[Array, " B"]:
    """1 where the label's logit is among the k largest, else 0; among equal logits the first ranks higher.

    >>> correct_in_top(2, jnp.array([[1.0, 3.0, 2.0], [1.0, 1.0, 1.0]]), jnp.array([2, 2]))
    Array([1., 0.], dtype=float32)

    Args:
      k: at least 1; 5 for the "top-5" of ImageNet.
      logits: floating [B, num_classes].
      labels: integer [B].

    Returns:
      float32 [B]; 0 where a logit is NaN or inf, or the label's is -inf, and where the label is outside
      [0, num_classes).
    """
    labels, classes = labels.astype(jnp.int32), logits.shape[-1]  # a uint8 cannot be compared with class 300
    # A count of the rank, unlike a sort, needs no communication when the batch is sharded.
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    class_index = jnp.arange(classes, dtype=jnp.int32)[None, :]
    behind = (logits < label_logit) | ((logits == label_logit) & (class_index >= labels[:, None]))
    # One inf or NaN, which is not below inf, counts as k logits ahead of the label's.
    ahead = jnp.where(logits < jnp.inf, (~behind).astype(jnp.int32), k)
    in_top = (jnp.sum(ahead, axis=-1) < k) & jnp.isfinite(label_logit[:, 0])
    return (in_top & (labels >= 0) & (labels < classes)).astype(jnp.float32)


def intersection_and_union(
    logits: Float[Array, "B *S K"], labels: Int[Array, " B *S"], *, ignore: int | None = None
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """Counts the pixels of each class in the intersection and in the union of prediction and label.

    The IoU (Jaccard index) of a class is its total intersection over all examples divided by its total union. The mean
    IoU averages over the classes that occur.

    Args:
      logits: floating [B, ..., num_classes]; the largest is the prediction, and there is none where a logit is NaN or
        inf, or all are -inf.
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      ignore: the label of positions to leave out; None counts all positions.

    Returns:
      The intersections and the unions, both float32 [B, num_classes], exact up to 2^24 pixels.
    """
    counts = _counts(labels, ignore)[..., None]
    classes = jnp.arange(logits.shape[-1], dtype=jnp.int32).reshape((1,) * labels.ndim + (-1,))
    chosen = (predicted(logits)[..., None] == classes) & counts
    there = (labels.astype(jnp.int32)[..., None] == classes) & counts
    return _count(chosen & there, keep=1).astype(jnp.float32), _count(chosen | there, keep=1).astype(jnp.float32)


def _counts(labels: jax.Array, ignore: int | None) -> jax.Array:
    """bool, in the shape of `labels`: True at counted positions."""
    return jnp.full(labels.shape, True) if ignore is None else labels.astype(jnp.int32) != ignore


def _count(flags: jax.Array, keep: int = 0) -> jax.Array:
    """Counts the set flags, int32, over all axes except the first and the last `keep`."""
    return jnp.sum(flags, axis=tuple(range(1, flags.ndim - keep)), dtype=jnp.int32)
