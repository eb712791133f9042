"""Augments and normalises batches of images on the device, inside the jitted step."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.config.schema import Data
from mpjax.data.augment.crops import flip_where, random_erasing, random_flip, random_resized_crop, random_shift
from mpjax.data.augment.mixing import cutmix, cutmix_masks, mixup, mixup_or_cutmix
from mpjax.data.augment.random_policy import randaugment
from mpjax.data.fields import IGNORED, Fields
from mpjax.data.orientation import MIRRORED
from mpjax.errors import UsageError


def prepare(
    batch: Mapping[str, jax.Array], key: jax.Array | None, *, config: Data, fields: Fields
) -> dict[str, jax.Array]:
    """Augments the images of a batch and normalises them to (image - mean) / std.

    Crops, shifts, flips and RandAugment come before the normalisation (`moved`); erasing, mixup and CutMix come after
    it (`mixed`).

    Args:
      batch: `image` [B, H, W, C]; uint8 is scaled from 0..255 to [0, 1], floating images are not scaled. A `mask`
        [B, H, W] moves with its image. With `config.alternate_flips`, `mirrored`, bool [B], marks the images to flip.
        Other fields are passed on unchanged.
      key: the random key of the augmentation. None: no augmentation, as in evaluation.
      config: the augmentations, and `mean` and `std` of one value or one per channel, in the scaled range.
      fields: the fields of the batch; with mixup or CutMix, `label` gives the number of classes.

    Returns:
      A new dict, with float32 images and without `mirrored`. If labelled images were mixed, it also has `target`,
      float32 [B, num_classes], the mixed one-hot labels; `label` stays.

    Raises:
      UsageError: images have a wrong dtype or rank (RandAugment needs uint8 and 1 or 3 channels), `mean` or `std` has a
        wrong length, a `std` is not positive, a strength is outside its range, mixup is set for masks, or
        `config.alternate_flips` is set and `mirrored` is missing or malformed.
    """
    images = batch["image"]
    if images.ndim != 4 or not (images.dtype == jnp.uint8 or jnp.issubdtype(images.dtype, jnp.floating)):
        raise UsageError(f"image: got {images.dtype} {images.shape}; wanted uint8 or floating [B, H, W, C]")
    mean, std = normalisation(config, images.shape[-1])
    keys = None if key is None else _Keys(*jax.random.split(key), *(jax.random.fold_in(key, n) for n in range(2, 6)))
    batch = dict(batch) if keys is None else moved(dict(batch), config, keys)
    batch.pop(MIRRORED, None)
    largest = np.float32(255 if images.dtype == jnp.uint8 else 1)  # one division in place of two
    batch["image"] = (batch["image"].astype(jnp.float32) - largest * mean) / (largest * std)
    return batch if keys is None else mixed(batch, config, fields, keys)


class _Keys(NamedTuple):
    """One random key per augmentation, so that enabling one does not change the draws of another."""

    shift: jax.Array
    flip: jax.Array
    crop: jax.Array
    randaugment: jax.Array
    erasing: jax.Array
    mixing: jax.Array


def moved(batch: dict[str, jax.Array], config: Data, keys: _Keys) -> dict[str, jax.Array]:
    """Crops, shifts, flips and applies RandAugment, in this order, to the images and masks of a batch.

    Each is applied only if `config` enables it. The dtype of the images stays: this comes before the cast to float32,
    because uint8 moves a quarter of the bytes. Mask pixels that move in from outside become `IGNORED`; with
    `config.crop_edges` 'reflect', a shift reflects them with the image. The result is a new dict. Raises as `prepare`.
    """
    images, mask = batch["image"], batch.get("mask")
    if config.random_resized_crop:
        images, mask = random_resized_crop(images, keys.crop, mask, area=(config.random_resized_crop, 1.0))
    if config.padding:
        # Black pixels that are shifted in have no label; reflected pixels keep theirs.
        fill, unlabelled = (None, None) if config.crop_edges == "reflect" else (0, IGNORED)
        images = random_shift(images, config.padding, keys.shift, fill=fill)
        mask = None if mask is None else random_shift(mask, config.padding, keys.shift, fill=unlabelled)
    if config.flip:
        flipped = functools.partial(random_flip, key=keys.flip)
        if config.alternate_flips:
            flipped = functools.partial(flip_where, chosen=_mirrored(batch))
        images, mask = flipped(images), None if mask is None else flipped(mask)
    if config.randaugment_ops:
        images, mask = randaugment(
            images,
            keys.randaugment,
            mask,
            operations=config.randaugment_ops,
            magnitude=config.randaugment_magnitude,
            mask_fill=IGNORED,
        )
    return {**batch, "image": images} | ({} if mask is None else {"mask": mask})


def _mirrored(batch: Mapping[str, jax.Array]) -> jax.Array:
    shape, mirrored = batch["image"].shape[:1], batch.get(MIRRORED)
    if mirrored is None or mirrored.shape != shape or mirrored.dtype != jnp.bool_:
        has = "none" if mirrored is None else f"{mirrored.dtype} {mirrored.shape}"
        raise UsageError(
            f"--data.alternate_flips needs the field '{MIRRORED}' of a batch, bool {shape}, which batches of "
            f"mpjax.data.train_batches have; got {has}"
        )
    return mirrored


def mixed(batch: dict[str, jax.Array], config: Data, fields: Fields, keys: _Keys) -> dict[str, jax.Array]:
    """Erases a rectangle of normalised images, then mixes pairs of images, each if `config` enables it.

    Mixed labels become the additional field `target`, float32 [B, num_classes]. In a batch with masks, the masks are
    mixed by CutMix instead. Erasing replaces `image` in `batch` itself.

    Raises:
      UsageError: mixup is set for masks, which cannot be averaged.
    """
    if config.random_erasing:
        batch["image"] = random_erasing(batch["image"], keys.erasing, config.random_erasing)
    if not (config.mixup or config.cutmix):
        return batch
    if "mask" in batch:
        if config.mixup:
            raise UsageError(f"--data.mixup {config.mixup}: masks cannot be averaged; write --data.cutmix 1")
        images, mask = cutmix_masks(batch["image"], batch["mask"], keys.mixing, config.cutmix)
        return {**batch, "image": images, "mask": mask}
    classes: Any = fields["label"]
    target = jax.nn.one_hot(batch["label"], classes.num_classes, dtype=jnp.float32)
    if config.mixup and config.cutmix:
        images, target = mixup_or_cutmix(batch["image"], target, keys.mixing, config.mixup, config.cutmix)
    else:
        mix = mixup if config.mixup else cutmix
        images, target = mix(batch["image"], target, keys.mixing, config.mixup or config.cutmix)
    return {**batch, "image": images, "target": target}


def normalisation(config: Data, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Checks `config.mean` and `config.std`, and returns each as float32 [1, 1, 1, 1] or [1, 1, 1, C].

    Raises:
      UsageError: `mean` or `std` has neither one value nor one per channel, or a `std` is not positive.
    """
    return _per_channel("mean", config.mean, channels), _per_channel("std", config.std, channels)


def _per_channel(field: str, values: tuple[float, ...], channels: int) -> np.ndarray:
    if len(values) not in (1, channels):
        raise UsageError(
            f"data.{field}: got {len(values)} values {values} for images of {channels} channels; "
            f"wanted one for all or one per channel, as in --data.{field} {' '.join(['0.5'] * channels)}"
        )
    if field == "std" and min(values) <= 0:
        raise UsageError(f"data.std: got {values}; wanted values above 0, as in --data.std 1")
    return np.asarray(values, np.float32).reshape(1, 1, 1, -1)
