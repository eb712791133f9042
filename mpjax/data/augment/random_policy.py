"""Applies RandAugment: a few random operations of one strength per image (Cubuk et al., 2019, arXiv:1909.13719).

A choice among 14 branches per image would compute all 14 for every image. Here each operation is a setting of three
stages: a table of levels, a blend with a duller version, and an affine move. Each stage is the identity by default. So
each image costs one pass through the three stages, whatever its operation.

Shapes: B batch, H height, W width, C channels.
"""

import jax
import jax.numpy as jnp

from mpjax.data.augment import pixels
from mpjax.data.augment.pixels import blend, gray_images, rotation, shear, smooth, translation, warp
from mpjax.errors import UsageError


OPERATIONS = (
    "autocontrast",
    "equalize",
    "invert",
    "solarize",
    "posterize",
    "brightness",
    "contrast",
    "color",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
STRONGEST = 10.0
GRAY = 128


def randaugment(
    images: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    *,
    operations: int = 2,
    magnitude: float = 9.0,
    mask_fill: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies random operations of `OPERATIONS` to each image in sequence, drawn anew for each image.

    Each operation has the same probability, and may be drawn twice; its direction, if it has two, is random as well.
    Magnitude 10 has the ranges of AutoAugment (Cubuk et al., 2018, arXiv:1805.09501, table 6): rotation by 30 degrees,
    shear of 0.3, translation by 0.45 of the image, each in both directions; solarize from level 0 on; posterize to 4
    bits; brightness, contrast, color and sharpness by 0.1 or 1.9. At magnitude 0, only autocontrast, equalize and
    invert change the image, because they have no strength.

    Args:
      images: uint8 [B, H, W, C] of 1 or 3 channels.
      key: the random key.
      mask: integer [B, H, W], moved with its image by the geometric operations, or None.
      operations: the number of operations per image, N in the paper.
      magnitude: the strength from 0 to 10, M in the paper.
      mask_fill: the label of mask pixels that move in from outside, such as the ignored class. In images these pixels
        are gray (128).

    Returns:
      Images and mask, of the same shapes and dtypes; the mask is None if none was given.

    Raises:
      UsageError: the dtype, rank or number of channels of the images is wrong, or the magnitude is outside 0..10.
    """
    if images.dtype != jnp.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UsageError(
            f"image: got {images.dtype} {images.shape}; RandAugment wants uint8 [B, H, W, 1 or 3], before normalisation"
        )
    if not 0 <= magnitude <= STRONGEST:
        raise UsageError(f"magnitude: got {magnitude}; wanted a number from 0 to 10, such as 9")
    batch = images.shape[0]
    drawn = jax.random.randint(key, (operations, batch), 0, 2 * len(OPERATIONS), jnp.int32)
    for number in drawn:
        sign = jnp.where(number % 2 == 0, 1, -1).astype(jnp.float32)
        strength = magnitude / STRONGEST * sign
        images, mask = apply_operations(images, mask, number // 2, strength, mask_fill=mask_fill)
    return images, mask


def apply_operations(
    images: jax.Array, mask: jax.Array | None, choice: jax.Array, strength: jax.Array, *, mask_fill: int = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Applies one operation of `OPERATIONS` to each image, and its move, if it is geometric, to its mask as well.

    It returns images and mask of the same shapes and dtypes; the mask is None if none was given. Arguments are not
    checked.

    Args:
      images: uint8 [B, H, W, C] of 1 or 3 channels.
      mask: integer [B, H, W] or None.
      choice: int32 [B], indices into `OPERATIONS`.
      strength: float32 [B] in [-1, 1], a fraction of the strongest change; the sign is the direction of operations
        that have two.
      mask_fill: the label of mask pixels that move in from outside.
    """
    height, width = images.shape[1:3]
    factor = 1 + 0.9 * strength
    images = pixels.look_up(images, _table(images, choice, strength, factor))

    color = _is("color", choice)
    dull = jnp.where(color[:, None, None, None], gray_images(images), smooth(images))
    factor = jnp.where(color | _is("sharpness", choice), factor, 1)
    images = blend(dull, images, factor[:, None, None, None])

    moves = _moves(choice, strength, height, width)
    return warp(images, moves, GRAY), None if mask is None else warp(mask, moves, mask_fill)


def _table(images: jax.Array, choice: jax.Array, strength: jax.Array, factor: jax.Array) -> jax.Array:
    """Builds the lookup tables of levels, int32 [B, C, 256], for the operation `choice` of each image.

    It is the identity for operations that no table describes. `factor`, float32 [B], scales brightness and contrast.
    """
    counts = pixels.histogram(images)
    amount = jnp.abs(strength)
    made = {
        "autocontrast": pixels.autocontrast(counts),
        "equalize": pixels.equalize(counts),
        "invert": pixels.invert(),
        "solarize": pixels.solarize(256 - jnp.floor(256 * amount).astype(jnp.int32)),
        "posterize": pixels.posterize(8 - jnp.floor(4 * amount).astype(jnp.int32)),
        "brightness": pixels.brightness(factor),
        "contrast": pixels.contrast(images, factor),
    }
    table = jnp.broadcast_to(pixels.identity(), counts.shape)
    for name, changed in made.items():
        table = jnp.where(_is(name, choice)[:, None, None], changed, table)
    return table


def _moves(choice: jax.Array, strength: jax.Array, height: int, width: int) -> jax.Array:
    """Builds the affine transforms for `warp`, float32 [B, 2, 3]; the identity if an operation is not geometric."""
    zero = jnp.zeros_like(strength)
    made = {
        "rotate": rotation(30 * strength, height, width),
        "shear_x": shear(0.3 * strength, zero),
        "shear_y": shear(zero, 0.3 * strength),
        "translate_x": translation(0.45 * width * strength, zero),
        "translate_y": translation(zero, 0.45 * height * strength),
    }
    moves = shear(zero, zero)
    for name, changed in made.items():
        moves = jnp.where(_is(name, choice)[:, None, None], changed, moves)
    return moves


def _is(name: str, choice: jax.Array) -> jax.Array:
    return choice == OPERATIONS.index(name)
