"""What happens to a batch of images on the device, inside the jitted step: augmentation, then normalisation."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.config.schema import Data
from mpjax.data.augmentation.shift import random_flip, random_shift
from mpjax.data.fields import IGNORED, Fields
from mpjax.errors import UsageError


def prepare(
    batch: Mapping[str, jax.Array], key: jax.Array | None, *, config: Data, fields: Fields
) -> dict[str, jax.Array]:
    """A batch as the objective takes it.

    Args:
      batch: `image` [B, H, W, C]; uint8 is scaled from 0..255 to [0, 1], floating images are taken as they are. A
        `mask` [B, H, W] moves with its image.
      key: of the augmentation, in training; None: no augmentation.
      config: which augmentations, and `mean` and `std` of one value or one per channel.
      fields: what the batch holds.

    Returns:
      The batch, its images float32.

    Raises:
      UsageError: images of another dtype or rank, a `mean` or `std` of another length, or a `std` that is not positive.
    """
    images = batch["image"]
    if images.ndim != 4 or not (images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)):
        raise UsageError(f"image: got {images.dtype} {images.shape}; wanted uint8 or floating [B, H, W, C]")
    mean, std = normalisation(config, images.shape[-1])
    batch = dict(batch)
    if key is not None:
        batch = moved(batch, config, key)
    pixels = batch["image"].astype(jnp.float32)
    if images.dtype == jnp.uint8:
        pixels = pixels / 255
    batch["image"] = (pixels - mean) / std
    return batch


def moved(batch: dict[str, jax.Array], config: Data, key: jax.Array) -> dict[str, jax.Array]:
    """Images and masks shifted and mirrored, on the stored values: uint8 moves a quarter of the bytes."""
    # Black moves in, which no label is about.
    fills = {"image": 0, "mask": IGNORED}
    shift_key, flip_key = jax.random.split(key)
    for name in fills.keys() & batch.keys():
        if config.crop_padding:
            batch[name] = random_shift(batch[name], config.crop_padding, shift_key, fill=fills[name])
        if config.flip:
            batch[name] = random_flip(batch[name], flip_key)
    return batch


def normalisation(config: Data, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """`mean` and `std` as float32 [1, 1, 1, 1 or C].

    Raises:
      UsageError: they are neither one value nor one per channel.
    """
    return _per_channel("mean", config.mean, channels), _per_channel("std", config.std, channels)


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
