"""What examples must be before a step sees them, and the one place where their dtypes are settled."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import is_floating


Shape = tuple[int, int, int]


def conform(example: Mapping[str, Any], num_classes: int, image_shape: Shape | None = None) -> dict[str, np.ndarray]:
    """Checks one example, or a batch of any nesting, and settles its dtypes.

    Args:
      example: `image` [..., H, W, C], uint8 or floating; `label` [...], any integer dtype.
      num_classes: labels must be in [0, num_classes).
      image_shape: the (H, W, C) that images must have; None: any.

    Returns:
      `image`, uint8 as it was or float32, and `label`, int32 of the same value.

    Raises:
      UsageError: a field is missing or is not as above, or a pixel is not finite; the message names the field.
    """
    for field in ("image", "label"):
        if field not in example:
            raise UsageError(f"{field}: missing; the example has {', '.join(example)}; wanted image and label")
    image = _settled_image(np.asarray(example["image"]), image_shape)
    label = _settled_label(np.asarray(example["label"]), num_classes)
    if image.shape[:-3] != label.shape:
        raise UsageError(
            f"label: shape {label.shape} does not go with image shape {image.shape}; "
            f"wanted one integer per image: {image.shape[:-3]}"
        )
    return {"image": image, "label": label}


def require_examples(split: str, count: int) -> None:
    """Raises UsageError when a split is empty."""
    if count == 0:
        raise UsageError(f"split '{split}' is empty: wanted at least one example; write a larger part, as in 'train'")


def _settled_image(image: np.ndarray, wanted: Shape | None) -> np.ndarray:
    if image.ndim < 3 or (wanted is not None and image.shape[-3:] != wanted):
        height, width, channels = wanted or ("height", "width", "channels")
        raise UsageError(
            f"image: shape {image.shape}; wanted [{height}, {width}, {channels}] per example "
            "(a grayscale image has 1 channel: write image[..., None]; images of several sizes need --data.image_size)"
        )
    if image.dtype == np.uint8:
        return image
    if not is_floating(image):
        raise UsageError(
            f"image: dtype {image.dtype}; wanted uint8 in 0..255, or floating point scaled as the model wants it; "
            "write image.astype(np.uint8) or image.astype(np.float32) / largest_value"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes inf, which is refused below
        image = image.astype(np.float32, copy=False)
    finite = np.isfinite(image)
    if not finite.all():
        first = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise UsageError(
            f"image: {image.size - np.count_nonzero(finite)} of {image.size} values are not finite in float32, "
            f"the first at {first}: {image[first]}; wanted finite pixels; repair the data or drop the example"
        )
    return image


def _settled_label(label: np.ndarray, num_classes: int) -> np.ndarray:
    if not np.issubdtype(label.dtype, np.integer):
        raise UsageError(
            f"label: dtype {label.dtype}; wanted integer class numbers in [0, {num_classes}); "
            "write label.astype(np.int32), or label.argmax(-1) for one-hot labels"
        )
    outside = (label < 0) | (label >= num_classes)
    if outside.any():
        raise UsageError(
            f"label: {int(label[outside].flat[0])} is outside [0, {num_classes}); "
            "wanted class numbers from 0; is num_classes right, and is the split labelled?"
        )
    if num_classes - 1 > np.iinfo(np.int32).max:
        raise UsageError(f"label: {num_classes} classes do not fit int32; wanted at most 2**31")
    return label.astype(np.int32)
