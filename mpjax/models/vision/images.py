"""What a `preprocessor_config.json` says about the images that weights are for, beside what a run feeds.

The statistics have to be those of the run. How images are cut and resized is told, not read.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG, ConfigKeys, read_object
from mpjax.models.vision.config_json import AUGMENTED, read_settings
from mpjax.models.vision.settings import TowerSettings, ViTSettings
from mpjax.strict_json import encode


PREPROCESSOR = "preprocessor_config.json"

_SIZES = ("size", "crop_size", "crop_pct", "do_center_crop", "resample")
"""Keys of how images are cut and resized, if `do_resize` is true or they are cropped."""

_UNUSED = (
    "_valid_processor_keys",
    "crop_pct",
    "crop_size",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "do_center_crop",
    "do_convert_rgb",  # the channels of images are compared
    "do_resize",
    "feature_extractor_type",
    "image_processor_type",
    "input_data_format",
    "processor_class",
    "resample",
    "return_tensors",
    "size",
)
"""Keys that change no number of an image that is cut and resized already."""


def require_statistics(folder: pathlib.Path, mean: Sequence[float], std: Sequence[float]) -> None:
    """Checks that `mean` and `std`, of images in [0, 1], are those of the folder's preprocessor_config.json, if any.

    Raises:
      UsageError: they are not, or the file is damaged or has what mpjax does not know.
    """
    file = folder / PREPROCESSOR
    if not file.is_file():
        return
    values = read_object(file)
    if not isinstance(values, Mapping):
        raise UsageError(f"{file}: wanted a JSON object, got {type(values).__name__}")
    keys = ConfigKeys(values, f"{file}: ", network="reader of images", file=file)
    factor = keys.take("rescale_factor", float, 1 / 255)
    if not keys.take("do_rescale", bool, True) or abs(factor * 255 - 1) > 1e-6:
        raise keys.refusal("rescale_factor", factor, "mpjax divides images by 255: wanted do_rescale and 1 / 255")
    normalizes = keys.take("do_normalize", bool, True)
    wanted: dict[str, tuple[float, ...]] = {"mean": (0.0,), "std": (1.0,)}
    for name in wanted:
        if normalizes or values.get(f"image_{name}") is not None:
            numbers = keys.take(f"image_{name}", list)
            if not numbers or not all(type(number) in (int, float) for number in numbers):
                raise keys.refusal(f"image_{name}", numbers, "wanted a list of numbers")
            wanted[name] = tuple(map(float, numbers)) if normalizes else wanted[name]
    keys.unused("image_mean", "image_std", *_UNUSED)
    keys.only("do_pad", False, None)
    keys.only("pad_size", None)
    keys.refuse_rest()
    if not (_equal(wanted["mean"], mean) and _equal(wanted["std"], std)):
        written, actual = (f"--data.mean {_words(m)} --data.std {_words(s)}" for m, s in (wanted.values(), (mean, std)))
        raise UsageError(
            f"the weights in {folder} are for images normalised as {PREPROCESSOR} says, {written}, and this run has "
            f"{actual}: write the former; for other statistics on purpose, change the file",
            repair={"data.mean": wanted["mean"], "data.std": wanted["std"]},
        )


def advice_on_images(folder: pathlib.Path, image_shape: tuple[int, ...] | None = None) -> list[str]:
    """Advises, in a list of sentences, on what mpjax does not read or does not know about images.

    With the shape of images, height, width and channels, a sentence says if position embeddings are interpolated.
    """
    file, settings, advice = folder / PREPROCESSOR, read_settings(folder), []
    rotates = getattr(settings, "rope", None) is not None
    if isinstance(settings, TowerSettings | ViTSettings) and not rotates and image_shape is not None:
        size = settings.image_size
        if any(side // settings.patch != size // settings.patch for side in image_shape[:2]):
            shown = " x ".join(map(str, image_shape[:2]))
            advice = [f"position embeddings of images of {size} x {size} pixels are interpolated to {shown}"]
    config = read_object(folder / CONFIG)
    changed = [f"{key} {encode(config[key])}" for key in AUGMENTED if config.get(key) is not None]
    if rotates and changed:
        advice = [f"config.json: {', '.join(changed)} without effect: training leaves the coordinates of patches alone"]
    if not file.is_file():
        unknown = f"{folder} has no {PREPROCESSOR}: no one knows if --data.mean and --data.std are those of the weights"
        return [*advice, unknown]
    values: Any = read_object(file)
    told = [f"{key} {encode(values[key])}" for key in _SIZES if values.get(key) is not None]
    if told:
        advice.append(f"{PREPROCESSOR}: {', '.join(told)} without effect: --data.image_size resizes images")
    return advice


def told_of_size(folder: pathlib.Path, image_shape: Sequence[int | None]) -> list[str]:
    """Says, in a list of at most one sentence, that preprocessor_config.json makes images of another size than a run.

    `image_shape` is the height, width and channels of the run's images.
    """
    file = folder / PREPROCESSOR
    values: Any = read_object(file) if file.is_file() else {}
    key = "crop_size" if values.get("do_center_crop") and values.get("crop_size") else "size"
    size = values.get(key)
    if isinstance(size, Mapping):
        size = [size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))]
    sides = [size, size] if isinstance(size, int) else size
    if not sides or None in sides or None in image_shape or list(image_shape[:2]) == sides:
        return []
    shown = " x ".join(map(str, image_shape[:2]))
    return [
        f"{PREPROCESSOR} is a copy, whose {key} {encode(values[key])} makes images of another size than the run's "
        f"{shown}: write that size there"
    ]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if both are the same for each channel; a single number is for all channels."""
    count = max(len(one), len(other))
    one, other = (tuple(values) * count if len(values) == 1 else values for values in (one, other))
    return len(one) == len(other) and all(abs(a - b) <= 1e-6 for a, b in zip(one, other, strict=True))


def _words(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" if float(f"{value:g}") == value else repr(value) for value in values)
