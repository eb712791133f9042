"""What happens to images on the device, inside the jitted step: random crop and mirror, then normalisation."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.config.schema import Data
from mpjax.errors import UsageError


def prepare(images: jax.Array, config: Data, key: jax.Array | None = None) -> jax.Array:
    """Images as the model takes them.

    Args:
      images: [B, H, W, C]; uint8 is scaled from 0..255 to [0, 1], floating images are taken as they are.
      config: `crop_padding`, `flip`, and `mean` and `std` of one value or one per channel.
      key: of the augmentation, in training; None: no augmentation.

    Returns:
      float32 [B, H, W, C].

    Raises:
      UsageError: images of another dtype or rank, a `mean` or `std` of another length, or a `std` that is not positive.
    """
    if images.ndim != 4 or not (images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)):
        raise UsageError(f"image: got {images.dtype} {images.shape}; wanted uint8 or floating [B, H, W, C]")
    mean, std = normalisation(config, images.shape[-1])
    if key is not None:
        # On the stored values: uint8 moves a quarter of the bytes, and padding with 0 is black.
        crop_key, flip_key = jax.random.split(key)
        if config.crop_padding:
            images = random_crop(images, config.crop_padding, crop_key)
        if config.flip:
            images = random_flip(images, flip_key)
    pixels = images.astype(jnp.float32)
    if images.dtype == jnp.uint8:
        pixels = pixels / 255
    return (pixels - mean) / std


def normalisation(config: Data, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """`mean` and `std` as float32 [1, 1, 1, 1 or C].

    Raises:
      UsageError: they are neither one value nor one per channel.
    """
    return _per_channel("mean", config.mean, channels), _per_channel("std", config.std, channels)


def random_crop(images: jax.Array, padding: int, key: jax.Array) -> jax.Array:
    """Shifts each image [H, W, C] by up to `padding` pixels either way; what moves in is 0."""
    batch, height, width, channels = images.shape
    padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    offsets = jax.random.randint(key, (batch, 2), 0, 2 * padding + 1, dtype=jnp.int32)

    def cut(image: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], jnp.int32(0)), (height, width, channels))

    return jax.vmap(cut)(padded, offsets)


def random_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors each image left to right with probability one half."""
    flip = jax.random.bernoulli(key, shape=(images.shape[0], 1, 1, 1))
    return jnp.where(flip, images[:, :, ::-1, :], images)


def _per_channel(field: str, values: tuple[float, ...], channels: int) -> np.ndarray:
    """`values` as float32 [1, 1, 1, 1 or C]."""
    if len(values) not in (1, channels):
        raise UsageError(
            f"data.{field}: got {len(values)} values {values} for images of {channels} channels; "
            f"wanted one for all or one per channel, as in --data.{field} {' '.join(['0.5'] * channels)}"
        )
    if field == "std" and min(values) <= 0:
        raise UsageError(f"data.std: got {values}; wanted values above 0, as in --data.std 1")
    return np.asarray(values, np.float32).reshape(1, 1, 1, -1)
