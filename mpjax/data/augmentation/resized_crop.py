"""A random part of each image at full size: the usual crop of ImageNet's training images.

Szegedy et al., "Going Deeper with Convolutions", 2014 (arXiv:1409.4842), section 6.
"""

import jax
import jax.numpy as jnp

from mpjax.data.augmentation.boxes import Boxes, random_boxes


def random_resized_crop(
    images: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    *,
    size: tuple[int, int] | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[jax.Array, jax.Array | None]:
    """Cuts a random rectangle out of each image and stretches it.

    Args:
      images: uint8 or floating [B, H, W, C].
      key: to draw from.
      mask: integer [B, H, W], cut and stretched alike; None: there is none.
      size: height and width of what comes out; None: those of the images.
      area: smallest and largest share of the image.
      ratio: smallest and largest height over width.

    Returns:
      Images [B, *size, C], interpolated bilinearly, and mask [B, *size], of the nearest pixels; dtypes as they were.
    """
    batch, height, width, _ = images.shape
    boxes = random_boxes(key, batch, (height, width), area, ratio)
    size = size or (height, width)
    return resized(images, boxes, size), None if mask is None else resized_mask(mask, boxes, size)


def resized(images: jax.Array, boxes: Boxes, size: tuple[int, int]) -> jax.Array:
    """The part of each image [B, H, W, C] in its box, stretched to `size` bilinearly."""
    # Two products of matrices with two weights in a row: accelerators multiply faster than they gather.
    rows = _weights(boxes.top, boxes.height, images.shape[1], size[0])
    columns = _weights(boxes.left, boxes.width, images.shape[2], size[1])
    exact = jax.lax.Precision.HIGHEST
    out = jnp.einsum("bij,bjwc->biwc", rows, images.astype(jnp.float32), precision=exact)
    out = jnp.einsum("bkw,biwc->bikc", columns, out, precision=exact)
    if jnp.issubdtype(images.dtype, jnp.integer):
        out = jnp.round(out)
    return out.astype(images.dtype)


def resized_mask(mask: jax.Array, boxes: Boxes, size: tuple[int, int]) -> jax.Array:
    """The part of each mask [B, H, W] in its box, stretched to `size`, each value that of the nearest pixel."""
    rows = _nearest(boxes.top, boxes.height, size[0])
    columns = _nearest(boxes.left, boxes.width, size[1])
    return jax.vmap(lambda mask, rows, columns: mask[rows][:, columns])(mask, rows, columns)


def _places(length: jax.Array, size: int) -> jax.Array:
    """float32 [B, size]: where in a stretch of `length` [B] pixels each of `size` pixels has its centre."""
    centres = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
    return centres[None, :] * length.astype(jnp.float32)[:, None]


def _nearest(start: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """int32 [B, size]: the pixel that each of `size` pixels shows."""
    return start[:, None] + jnp.minimum(_places(length, size).astype(jnp.int32), length[:, None] - 1)


def _weights(start: jax.Array, length: jax.Array, pixels: int, size: int) -> jax.Array:
    """float32 [B, size, pixels]: how much of each pixel each of `size` pixels shows."""
    last = length.astype(jnp.float32)[:, None] - 1
    centres = start.astype(jnp.float32)[:, None] + jnp.clip(_places(length, size) - 0.5, 0, last)
    distance = jnp.abs(centres[:, :, None] - jnp.arange(pixels, dtype=jnp.float32)[None, None, :])
    return jnp.maximum(1 - distance, 0)
