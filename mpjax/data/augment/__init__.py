"""Augments batches of images on the device, inside the jitted step."""

from mpjax.data.augment.crops import random_erasing, random_resized_crop
from mpjax.data.augment.mixing import cutmix, cutmix_masks, mixup, mixup_or_cutmix
from mpjax.data.augment.random_policy import randaugment


__all__ = [
    "cutmix",
    "cutmix_masks",
    "mixup",
    "mixup_or_cutmix",
    "randaugment",
    "random_erasing",
    "random_resized_crop",
]
