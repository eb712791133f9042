"""Mixes pairs of images and their labels: mixup and CutMix.

Image i is mixed with image B - 1 - i. Batches are already shuffled, so pairs need no random draw.

Shapes: B batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.data.augment.crops import Boxes
from mpjax.errors import UsageError


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int, Num


def mixup(
    images: Float[Array, "B H W C"], targets: Float[Array, "B K"], key: jax.Array, alpha: float
) -> tuple[Float[Array, "B H W C"], Float[Array, "B K"]]:
    """Averages images i and B - 1 - i, and their targets, with random weights (Zhang et al., 2017, arXiv:1710.09412).

    Each image i has a random weight w of its own: the result is w * image i + (1 - w) * image B - 1 - i.

    Args:
      images: floating [B, H, W, C], normalised.
      targets: floating [B, K]; each row is a distribution over the classes.
      key: the random key of the weights.
      alpha: the parameter of the weights, which are Beta(alpha, alpha) distributed; above 0, such as 0.2.

    Returns:
      Images and targets of the same shapes and dtypes.

    Raises:
      UsageError: `alpha` is not above 0, or targets are not floating [B, K].
    """
    weight = _drawn_fractions(images, targets, key, alpha)
    return _average(images, weight[:, None, None, None]), _average(targets, weight[:, None])


def cutmix(
    images: Num[Array, "B H W C"], targets: Float[Array, "B K"], key: jax.Array, alpha: float
) -> tuple[Num[Array, "B H W C"], Float[Array, "B K"]]:
    """Replaces a rectangle of image i by the same rectangle of image B - 1 - i (Yun et al., 2019, arXiv:1905.04899).

    Each image has a random rectangle of its own, of the image's aspect ratio. The targets of both images are averaged,
    with the fraction of pixels that each image has in the result as its weight.

    Args:
      images: [B, H, W, C] of any dtype.
      targets: floating [B, K]; each row is a distribution over the classes.
      key: the random key.
      alpha: the parameter of the fraction of image i that is kept, which is Beta(alpha, alpha) distributed before the
        image's border clips the rectangle; above 0, such as 1.

    Returns:
      Images and targets of the same shapes and dtypes.

    Raises:
      UsageError: see `mixup`.
    """
    fraction_key, place_key = jax.random.split(key)
    fractions = _drawn_fractions(images, targets, fraction_key, alpha)
    inside = _cut(place_key, fractions, *images.shape[1:3]).contain(*images.shape[1:3])
    return _paste(images, inside[..., None]), _average(targets, _kept(inside)[:, None])


def cutmix_masks(
    images: Num[Array, "B H W C"], masks: Int[Array, "B H W"], key: jax.Array, alpha: float
) -> tuple[Num[Array, "B H W C"], Int[Array, "B H W"]]:
    """Replaces a rectangle of image i, and of its mask, by the same rectangle of image and mask B - 1 - i.

    Rectangles and `alpha` are as in `cutmix`; masks are not averaged. Raises UsageError if `alpha` is not above 0.
    """
    fraction_key, place_key = jax.random.split(key)
    fractions = _beta(fraction_key, images.shape[0], alpha)
    inside = _cut(place_key, fractions, *images.shape[1:3]).contain(*images.shape[1:3])
    return _paste(images, inside[..., None]), _paste(masks, inside)


def mixup_or_cutmix(
    images: jax.Array,
    targets: jax.Array,
    key: jax.Array,
    mixup_alpha: float,
    cutmix_alpha: float,
    *,
    cutmix_share: float = 0.5,
) -> tuple[jax.Array, jax.Array]:
    """Applies mixup to some images of a batch and CutMix to the others, at random (timm's `Mixup` per element).

    It returns images and targets of the same shapes and dtypes.

    Args:
      images: floating [B, H, W, C], normalised.
      targets: floating [B, K]; each row is a distribution over the classes.
      key: the random key.
      mixup_alpha: see `mixup`; 0.8 is usual.
      cutmix_alpha: see `cutmix`; 1 is usual.
      cutmix_share: the probability of CutMix for an image.

    Raises:
      UsageError: see `mixup`.
    """
    mixup_key, cutmix_key, choice_key = jax.random.split(key, 3)
    mixed = mixup(images, targets, mixup_key, mixup_alpha)
    cut = cutmix(images, targets, cutmix_key, cutmix_alpha)
    choice = jax.random.bernoulli(choice_key, cutmix_share, (images.shape[0],))
    return jnp.where(choice[:, None, None, None], cut[0], mixed[0]), jnp.where(choice[:, None], cut[1], mixed[1])


def _drawn_fractions(images: jax.Array, targets: jax.Array, key: jax.Array, alpha: float) -> jax.Array:
    batch = images.shape[0]
    if targets.ndim != 2 or targets.shape[0] != batch or not jnp.issubdtype(targets.dtype, jnp.floating):
        raise UsageError(
            f"targets: got {targets.dtype} {targets.shape} for {batch} images; wanted floating [{batch}, num_classes]; "
            "write jax.nn.one_hot(labels, num_classes)"
        )
    return _beta(key, batch, alpha)


def _beta(key: jax.Array, batch: int, alpha: float) -> jax.Array:
    """Draws a number for each image from Beta(alpha, alpha), float32 [B]; UsageError if `alpha` is not above 0."""
    if alpha <= 0:
        raise UsageError(
            f"alpha: got {alpha}; wanted a number above 0, such as 0.2; to train without mixing, remove the call"
        )
    return jax.random.beta(key, alpha, alpha, (batch,), jnp.float32)


def _cut(key: jax.Array, fractions: jax.Array, height: int, width: int) -> Boxes:
    """Draws a rectangle around a random pixel of each image, with the image's aspect ratio and 1 - share of its area.

    Rectangles may extend beyond the image. `fractions` is float32 [B], the fraction of each image to keep.
    """
    side = jnp.sqrt(1 - fractions)
    heights = jnp.floor(height * side).astype(jnp.int32)
    widths = jnp.floor(width * side).astype(jnp.int32)
    row_key, column_key = jax.random.split(key)
    rows = jax.random.randint(row_key, fractions.shape, 0, height, jnp.int32)
    columns = jax.random.randint(column_key, fractions.shape, 0, width, jnp.int32)
    return Boxes(rows - heights // 2, columns - widths // 2, heights, widths)


def _kept(inside: jax.Array) -> jax.Array:
    """Computes the fraction of each image's pixels that `inside`, bool [B, H, W], does not mark, float32 [B]."""
    pixels = inside.shape[1] * inside.shape[2]
    return jnp.sum(~inside, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) / pixels


def _paste(values: jax.Array, inside: jax.Array) -> jax.Array:
    return jnp.where(inside, values[::-1], values)


def _average(values: jax.Array, weight: jax.Array) -> jax.Array:
    weight = weight.astype(values.dtype)
    return weight * values + (1 - weight) * values[::-1]
