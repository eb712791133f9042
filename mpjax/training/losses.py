"""Losses and scores per example, always in float32 or wider, whatever the logits' dtype.

Shapes: B batch, K classes, ... the places of one example that have a class each, such as H W or T.
"""

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import FLOAT32, widest


def cross_entropy(logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0) -> jax.Array:
    """Softmax cross entropy of each example.

    Args:
      logits: floating [B, num_classes].
      labels: integer [B].
      label_smoothing: share of the target spread evenly over all classes (Szegedy et al., 2015, arXiv:1512.00567).

    Returns:
      float32 (or wider) [B].
    """
    logits = _wide(logits)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing == 0:
        return nll
    uniform = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
    return (1 - label_smoothing) * nll + label_smoothing * uniform


def soft_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Softmax cross entropy of each example with a distribution over classes, as mixed images have.

    Args:
      logits: floating [B, num_classes].
      targets: floating [B, num_classes], rows that sum to 1.

    Returns:
      float32 (or wider) [B].
    """
    logits = _wide(logits)
    return -jnp.sum(targets.astype(logits.dtype) * jax.nn.log_softmax(logits), axis=-1)


def cross_entropy_over(logits: jax.Array, labels: jax.Array, *, ignore: int | None = None) -> jax.Array:
    """Softmax cross entropy of each example, the mean over its pixels, or over whatever places have a class each.

    Args:
      logits: floating [B, ..., num_classes].
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      ignore: the label of places that do not count, such as 255; None: all count.

    Returns:
      float32 (or wider) [B]; 0 where no place counts.
    """
    total, count = masked_cross_entropy(logits, labels, _counts(labels, ignore))
    return total / jnp.maximum(count, 1)


def masked_cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax cross entropy of each example, summed over its tokens, and how many there are.

    A language model's loss is the sum of all sums over the sum of all counts; its perplexity see `perplexity`.

    Args:
      logits: floating [B, ..., num_classes].
      labels: integer [B, ...]; where the mask is not set, any value.
      mask: bool, integer or floating [B, ...]: the places that count are not 0.

    Returns:
      The sums and the counts, both float32 (or wider) [B].
    """
    counts = mask.astype(bool)
    logits = _wide(logits)
    # A label outside the classes gives NaN: masked out below, but `jax_debug_nans` would stop at it.
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, labels, 0))
    places = tuple(range(1, labels.ndim))
    return jnp.sum(jnp.where(counts, nll, 0), axis=places), _count(counts).astype(nll.dtype)


def perplexity(total: jax.Array, count: jax.Array) -> jax.Array:
    """exp(total / count) of summed `masked_cross_entropy`; inf from a mean of 89 on, where float32 ends; 1 of none."""
    return jnp.exp(total / jnp.maximum(count, 1))


def dice_loss(logits: jax.Array, labels: jax.Array, *, smooth: float = 1.0, ignore: int | None = None) -> jax.Array:
    """One minus the soft Dice coefficient of each example, the mean over classes.

    Milletari et al., 2016 (arXiv:1606.04797), equation in section 3: 2 sum(p g) / (sum(p^2) + sum(g^2)), here with
    `smooth` added above and below, so that a class that is absent and not predicted costs nothing.

    Args:
      logits: floating [B, ..., num_classes], of a softmax.
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      smooth: in pixels, above 0.
      ignore: the label of places that do not count; None: all count.

    Returns:
      float32 (or wider) [B], from 0 to below 1.
    """
    logits = _wide(logits)
    counts = _counts(labels, ignore)[..., None]
    places = tuple(range(1, labels.ndim))
    found = jnp.where(counts, jax.nn.softmax(logits), 0)
    wanted = jnp.where(counts, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), 0)
    overlap = jnp.sum(found * wanted, axis=places)
    size = jnp.sum(jnp.square(found), axis=places) + jnp.sum(jnp.square(wanted), axis=places)
    return 1 - jnp.mean((2 * overlap + smooth) / (size + smooth), axis=-1)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """float32 [B]: 1 where the largest of the logits [B, num_classes] is the label's, else 0."""
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def correct_in_top(k: int, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether the label's logit is among the k largest; of equal ones the first count as larger, as in `correct`.

    Args:
      k: at least 1; 5 for the "top-5" of ImageNet.
      logits: floating [B, num_classes].
      labels: integer [B].

    Returns:
      float32 [B], 1 or 0; 0 where the label's logit is NaN.
    """
    # A rank instead of a sort: it stays on each device when the batch is sharded.
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    place = jnp.arange(logits.shape[-1], dtype=labels.dtype)[None, :]
    behind = (logits < own) | ((logits == own) & (place >= labels[:, None]))
    return (jnp.sum(~behind, axis=-1) < k).astype(jnp.float32)


def intersection_and_union(
    logits: jax.Array, labels: jax.Array, *, ignore: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """How many pixels of each class are rightly found, and how many are found, there, or both.

    The sum of the first over all examples divided by that of the second is a class's IoU (Jaccard index); mean IoU is
    its mean over the classes that occur.

    Args:
      logits: floating [B, ..., num_classes]; the largest is what is found.
      labels: integer [B, ...], in [0, num_classes) or `ignore`.
      ignore: the label of places that do not count; None: all count.

    Returns:
      The intersections and the unions, both float32 [B, num_classes], exact up to 2^24 pixels.
    """
    counts = _counts(labels, ignore)[..., None]
    classes = jnp.arange(logits.shape[-1], dtype=jnp.int32).reshape((1,) * labels.ndim + (-1,))
    found = (jnp.argmax(logits, axis=-1)[..., None] == classes) & counts
    there = (labels.astype(jnp.int32)[..., None] == classes) & counts
    return _count(found & there, keep=1).astype(jnp.float32), _count(found | there, keep=1).astype(jnp.float32)


def _wide(logits: jax.Array) -> jax.Array:
    return logits.astype(widest(logits.dtype, FLOAT32))


def _counts(labels: jax.Array, ignore: int | None) -> jax.Array:
    """bool, of the shape of `labels`: which places count."""
    return jnp.full(labels.shape, True) if ignore is None else labels.astype(jnp.int32) != ignore


def _count(flags: jax.Array, keep: int = 0) -> jax.Array:
    """int32: how many flags are set, over all axes but the first and the last `keep`."""
    return jnp.sum(flags, axis=tuple(range(1, flags.ndim - keep)), dtype=jnp.int32)
