"""Checks that augmentations which move or mix images also move or mix the other fields of the batch."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.fields import Field, Fields, Image, Mask, Numbers
from mpjax.errors import DataWarning, UsageError


_INTEGER = np.dtype(np.int32)
_YOURS = "or augment all of them in a function of yours, --data.augment FILE.py:NAME"


def require_together(config: Data, fields: Fields) -> None:
    """Checks that the augmentations of `config` change all fields of a batch together with its `image`.

    Geometric augmentations (crops, shifts, flips, RandAugment) move `image`, and a `mask` of class numbers of the same
    height and width. Mixup and CutMix change `image` and `mask`, or without such a mask `image` and `label`. A field of
    one axis, such as a bounding box, may hold coordinates, which stay as they are if the image moves: a DataWarning
    tells of it.

    Raises:
      UsageError: the image would move and a field of two or more axes would not, or the image would be mixed and any
        other field besides its mask or label would not, or images would be mixed with labels whose number of classes is
        unknown.
    """
    if moving := [*_geometric(config)]:
        flags = " and ".join(flag for flag, _ in moving)
        without = " ".join(off for _, off in moving)
        if behind := {name: field for name, field in fields_behind(fields).items() if field.rank >= 2}:
            raise UsageError(
                f"{flags}: the image moves, and {_list(behind)} would not; write {without}, leave "
                f"{'it' if len(behind) == 1 else 'them'} out with --data.columns, {_YOURS}"
            )
        vectors = {
            name: field for name, field in fields.items() if isinstance(field, Numbers) and field.dtype.kind in "if"
        }
        if vectors := {name: field for name, field in vectors.items() if field.rank == 1}:
            warnings.warn(
                f"{flags}: the image moves, and {_list(vectors)} stays as it is; if these are coordinates, write "
                f"{without}, {_YOURS}",
                DataWarning,
                stacklevel=2,
            )
    _require_mixed(config, fields)


def _geometric(config: Data) -> Iterator[tuple[str, str]]:
    """Yields, for each enabled augmentation that moves pixels, its command-line flag and the flag that disables it."""
    if config.random_resized_crop:
        yield f"--data.random_resized_crop {config.random_resized_crop}", "--data.random_resized_crop 0"
    if config.padding:
        yield f"--data.crop_padding {config.padding}", "--data.crop_padding 0"
    if config.flip:
        yield "--data.flip", "--data.no_flip"
    if config.randaugment_ops:
        yield f"--data.randaugment_ops {config.randaugment_ops}", "--data.randaugment_ops 0"


def fields_behind(fields: Fields) -> Mapping[str, Field]:
    """Selects the fields that stay unchanged when an augmentation moves the image: all but `image` and its mask.

    The mask is a field `mask` that is a `Mask`, or int32 `Numbers` of the image's height and width.
    """
    return {name: field for name, field in fields.items() if name != "image" and not _is_moved(name, field, fields)}


def _is_moved(name: str, field: Field, fields: Fields) -> bool:
    if name != "mask" or isinstance(field, Mask):
        return name == "mask"
    image: Any = fields["image"]
    return isinstance(field, Numbers) and field.dtype == _INTEGER and field.shape == image.shape[:2]


def _require_mixed(config: Data, fields: Fields) -> None:
    mixing = [f"--data.{name} {value}" for name in ("mixup", "cutmix") if (value := getattr(config, name))]
    if not mixing:
        return
    flags, without = " and ".join(mixing), " ".join(f"--data.{flag} 0" for flag in ("mixup", "cutmix"))
    partner = "mask" if "mask" in fields and _is_moved("mask", fields["mask"], fields) else "label"
    if partner == "label" and "label" not in fields:
        raise UsageError(f"{flags}: images are mixed with their labels, and these have none; write {without}")
    if partner == "label" and not getattr(fields.get("label"), "num_classes", 0):
        raise UsageError(
            f"{flags}: images are mixed with their labels, which have no number of classes here; write "
            f"--data.num_classes N, or {without}"
        )
    if behind := {name: field for name, field in fields.items() if name not in ("image", partner)}:
        raise UsageError(
            f"{flags}: image and {partner} are mixed, and {_list(behind)} would not be; write {without}, leave "
            f"{'it' if len(behind) == 1 else 'them'} out with --data.columns, {_YOURS}"
        )


def require_one_frame(fields: Fields, image_size: int) -> None:
    """Raises UsageError if images would be cropped on the host, and another field of two or more axes would not.

    With `image_size`, images and masks are resized to a square. They are cropped first, unless all images are squares
    of one size: then nothing is cropped, and nothing is raised.
    """
    images = [field for field in fields.values() if isinstance(field, Image)]
    cropped = any(None in field.shape or field.shape[0] != field.shape[1] for field in images)
    behind = {name: field for name, field in fields.items() if field.rank >= 2 and not isinstance(field, Image | Mask)}
    if cropped and behind:
        raise UsageError(
            f"--data.image_size {image_size}: images are cropped, and {_list(behind)} would not be; crop and resize "
            "all of them in a function of yours, --data.preprocess FILE.py:NAME, and leave image_size out"
        )


def _list(fields: Mapping[str, Field]) -> str:
    return ", ".join(f"{name} {list(getattr(field, 'shape', ()))}" for name, field in fields.items())
