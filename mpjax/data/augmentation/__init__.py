"""Random changes of a batch of images on the device, inside the jitted step: images and a key in, images out."""

from mpjax.data.augmentation.erasing import random_erasing
from mpjax.data.augmentation.mixing import cutmix, cutmix_masks, mixup, mixup_or_cutmix
from mpjax.data.augmentation.randaugment import randaugment
from mpjax.data.augmentation.resized_crop import random_resized_crop


__all__ = [
    "cutmix",
    "cutmix_masks",
    "mixup",
    "mixup_or_cutmix",
    "randaugment",
    "random_erasing",
    "random_resized_crop",
]
