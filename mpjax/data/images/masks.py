"""Decodes masks, and maps their stored values to class numbers and to the number of ignored pixels."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, array
from mpjax.data.fields import IGNORED
from mpjax.data.images.decoding import name_of, named_errors, opened
from mpjax.data.images.depth import stored_numbers
from mpjax.errors import DataWarning, UsageError


def decoded_mask(stored: Any) -> Any:
    """Decodes a mask to the stored value of each pixel, [H, W, 1]; returns anything but bytes unchanged.

    The values are not mapped to classes yet (`MaskValues`). A palette is not applied: its indices are the values, and
    its colours are only for display, as in Pascal VOC's masks. A mask of 1 bit becomes uint8 0 and 1.

    Args:
      stored: an encoded image, or an array.

    Raises:
      UsageError: the bytes are not an image, or the image has several channels.
    """
    if not isinstance(stored, bytes):
        return stored
    with named_errors(stored, "mask"):
        picture = opened(stored)
        pixels = stored_numbers(picture)
    if pixels.ndim != 2:
        raise UsageError(
            f"{name_of(stored) or 'mask'}: a colour image (Pillow's mode {picture.mode}); wanted one channel of class "
            "numbers; convert each colour of the masks to its class, and store them as PNG"
        )
    return pixels.astype(np.uint8)[..., None] if pixels.dtype == np.bool_ else pixels[..., None]


def with_decoded_masks(fields: Sequence[str], example: Example) -> Example:
    """Copies an example with the masks named in `fields` decoded to arrays of stored values (`class_numbers`)."""
    return {**example, **{name: decoded_mask(example[name]) for name in fields}}


_LOOKED_AT = 256
"""The number of masks, evenly spaced over the training split, that are searched for their values."""


@dataclasses.dataclass(frozen=True)
class MaskValues:
    """The mapping from the stored values of masks to class numbers.

    Attributes:
      classes: the stored value of each class; the position in the tuple is the class number.
      ignored: the stored values of ignored pixels. They take precedence if they are also in `classes`.
      name: the name of the data set, for messages.
    """

    classes: tuple[int, ...]
    ignored: tuple[int, ...]
    name: str

    def class_numbers(self, mask: np.ndarray) -> np.ndarray:
        """Maps an integer array of stored values to class numbers, and ignored values to `IGNORED` (255), as uint8.

        >>> MaskValues(classes=(0, 255), ignored=(7,), name="cells").class_numbers(np.array([255, 0, 7]))
        array([  1,   0, 255], dtype=uint8)

        Raises:
          UsageError: a value is neither a class nor ignored.
        """
        values, meanings = self._sorted
        if mask.dtype == np.uint8:
            index = self._places[mask]
        else:
            index = np.searchsorted(values, mask).clip(max=len(values) - 1)
        if (values[index] != mask).any():
            strange = int(mask[values[index] != mask].flat[0])
            besides = f", nor an ignored value ({_listed(self.ignored)})" if self.ignored else ""
            raise UsageError(
                f"mask: value {strange} of '{self.name}' is not one of {_listed(self.classes)}{besides}; "
                f"{_advice(strange)}"
            )
        return meanings[index]

    def with_class_numbers(self, example: Example) -> Example:
        """Copies an example with the stored values of its `mask` mapped to class numbers.

        An example without a mask is returned unchanged. Raises UsageError if the mask does not hold integers, or as
        `class_numbers`.
        """
        if "mask" not in example:
            return example  # `conform` reports the missing field
        return {**example, "mask": self.class_numbers(_integers(example["mask"]))}

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The stored values with a meaning in ascending order, and the class number or `IGNORED` (uint8) of each."""
        meanings = {value: number for number, value in enumerate(self.classes)} | dict.fromkeys(self.ignored, IGNORED)
        values = sorted(meanings)
        return np.asarray(values), np.asarray([meanings[value] for value in values], np.uint8)

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """For each byte 0..255, the index in the values of `_sorted`, int [256]: a table is much faster than a search.

        For a byte that is not among them, it is the index of some other value.
        """
        return np.searchsorted(self._sorted[0], np.arange(256)).clip(max=len(self._sorted[0]) - 1)


def mask_values(
    train: Examples, num_classes: int, config: Data, name: str, stored: Examples | None = None
) -> MaskValues:
    """Finds the mapping from stored values to classes, by the settings or by up to 256 masks of the training split.

    `config.mask_values`, if set, are the stored values of the classes. Otherwise stored values are class numbers. If
    the masks hold other values, and exactly as many as there are classes, the values in ascending order are the
    classes, with a DataWarning. Warnings also name classes that none of these masks contains, and report if more than
    half of their pixels are ignored, or that JPEG compression may have changed the values.

    Args:
      train: the examples of the training split, with decoded masks.
      num_classes: the number of classes of the task.
      config: the settings `mask_values` and `ignore_index`.
      name: the name of the data set.
      stored: the examples before their masks are decoded, in which JPEGs are searched for. None: no search, because a
        preprocess function may have changed the values.

    Raises:
      UsageError: the stored values cannot be matched to the classes, perhaps because a lossy format changed them, or
        the settings contradict each other.
    """
    chosen, ignored = tuple(config.mask_values), tuple(config.ignore_index)
    if chosen and (len(chosen) != num_classes or len(set(chosen)) != len(chosen) or set(ignored) & set(chosen)):
        besides = f", none of them in --data.ignore_index {' '.join(map(str, ignored))}" if ignored else ""
        raise UsageError(
            f"--data.mask_values {' '.join(map(str, chosen))}: wanted {num_classes} different values, one for each "
            f"class{besides}"
        )
    counts, looked_at = _counted(train, name)
    present = sorted(set(counts) - set(ignored))
    classes = chosen or tuple(range(num_classes))
    if noise := compression_noise({value: counts[value] for value in present}, stored, looked_at):
        if not set(present) <= set(classes):
            raise UsageError(noise)
        warnings.warn(noise, DataWarning, stacklevel=2)
    if not chosen and not set(present) <= set(classes):
        if len(present) != num_classes:
            raise UsageError(
                f"mask: the stored values {looked_at} are {_listed(present)}, but the {num_classes} classes of the "
                f"task are 0 to {num_classes - 1}; {_advice(present[-1])}"
            )
        classes = tuple(present)
        _tell(
            f"the stored values {_listed(present)} are used as classes 0 to {num_classes - 1}: exactly {num_classes} "
            f"values occur {looked_at}"
        )
    values = MaskValues(classes, ignored, name)
    if not counts:
        return values
    if missing := [str(number) for number, value in enumerate(classes) if value not in {*counts, *ignored}]:
        _tell(f"class {', '.join(missing)} of {num_classes} does not occur {looked_at}")
    ignored_fraction = sum(counts.get(value, 0) for value in ignored) / sum(counts.values())
    if ignored_fraction > 0.5:
        _tell(
            f"{ignored_fraction:.0%} of the pixels are ignored by --data.ignore_index {_listed(ignored)}, {looked_at}"
        )
    return values


def unknown_classes(
    train: Examples, config: Data, name: str, origin: str, stored: Examples | None = None
) -> UsageError:
    """Builds the error for an unknown number of classes; the caller raises it.

    It reads a sample of the masks, and names the settings that fit their values (also as its `repair`), or the JPEG
    that has changed them. `origin` is the column of the masks, for the message, or empty; the other arguments are as in
    `mask_values`.
    """
    counts, looked_at = _counted(train, name)
    present = sorted(set(counts) - set(config.ignore_index))
    if noise := compression_noise({value: counts[value] for value in present}, stored, looked_at):
        return UsageError(noise)
    mask = f"mask ({origin})" if origin else "mask"
    prefix = f"data set '{name}' does not say how many classes its {mask} has; the stored values {looked_at}"
    if len(present) < 2:
        return UsageError(f"{prefix} are {_listed(present) or 'none'}; write --data.num_classes N")
    if len(present) > _MOST_CLASSES:
        return UsageError(
            f"{prefix} are {_listed(present)}; write --data.num_classes N if they are class numbers. Masks that were "
            "stored as JPEG have more values than classes: store them as PNG"
        )
    if present == list(range(len(present))):
        repair = {"data.num_classes": len(present)}
        return UsageError(f"{prefix} are {_listed(present)}; write --data.num_classes {len(present)}", repair=repair)
    return UsageError(
        f"{prefix} are {_listed(present)}; write --data.mask_values {' '.join(map(str, present))}, the value of each "
        "class, from class 0; values that stand for no class go to --data.ignore_index instead",
        repair={"data.mask_values": tuple(present)},
    )


_MOST_CLASSES = 64
"""The most stored values that are suggested as the values of classes."""


def _counted(train: Examples, name: str) -> tuple[dict[int, int], str]:
    """Counts the pixels of each stored value in up to 256 masks, evenly spaced, and describes this sample in words.

    Examples without a mask are skipped.
    """
    indices = sorted({int(i) for i in np.linspace(0, len(train) - 1, _LOOKED_AT)}) if len(train) else []
    counts: dict[int, int] = {}
    for index in indices:
        example = train[index]
        if "mask" in example:
            for value, count in zip(*np.unique(_integers(example["mask"]), return_counts=True), strict=True):
                counts[int(value)] = counts.get(int(value), 0) + int(count)
    return counts, f"in {len(indices)} of {len(train)} masks of '{name}'"


def _integers(mask) -> np.ndarray:
    numbers = array("mask", mask)
    if not np.issubdtype(numbers.dtype, np.integer):
        raise UsageError(
            f"mask: dtype {numbers.dtype}; wanted integers; write mask.astype(np.int32) in the function of "
            "--data.preprocess, or mask.argmax(-1) for one-hot masks"
        )
    return numbers


def _tell(text: str) -> None:
    warnings.warn(f"mask: {text}", DataWarning, stacklevel=2)


def _advice(value: int) -> str:
    return (
        "write --data.mask_values with the stored value of each class, as in --data.mask_values 0 255, or "
        f"--data.ignore_index {value} to ignore pixels of that value"
    )


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"


_HEADERS = 16
_LEVEL = 0.05
"""The smallest share of pixels from which a value is considered intended, not noise."""


def compression_noise(counts: Mapping[int, int], stored: Examples | None, looked_at: str) -> str:
    """Formats the message about masks that JPEG compression has damaged, with advice; empty if none seems damaged.

    A JPEG of class numbers decodes to neighbouring values as well, nearly always one or two apart. Masks seem damaged
    if two values differ by at most 2, and one of some 16 stored masks is a JPEG.

    Args:
      counts: the number of pixels of each value in the decoded masks, without ignored values.
      stored: the examples before their `mask` is decoded. None: the values differ from the files, so the result is
        empty.
      looked_at: describes the sample in which the values were counted.
    """
    present = sorted(counts)
    near = any(above - below <= 2 for below, above in itertools.pairwise(present))
    if not near or stored is None or (name := _first_jpeg(stored)) is None:
        return ""
    levels = _levels(counts)
    around = f", most of them near {', '.join(map(str, levels))}" if levels else ""
    shown = ", ".join(map(str, present[:8])) + (f" and {len(present) - 8} more" if len(present) > 8 else "")
    return (
        f"mask: {name or 'masks'}: a JPEG, whose compression changes class numbers: the stored values {looked_at} are "
        f"{shown}{around}; write the masks as PNG from their source, or round each value to the one that was meant, in "
        "a function for --data.preprocess"
    )


def _levels(counts: Mapping[int, int]) -> list[int]:
    """Finds the values that at least the fraction `_LEVEL` of the pixels has, ascending.

    Of two values that differ by at most 2, only the more frequent one is kept; each value is compared with the last one
    kept.
    """
    levels: list[int] = []
    for value in sorted(value for value, count in counts.items() if count >= _LEVEL * sum(counts.values())):
        if levels and value - levels[-1] <= 2:
            levels[-1] = max(levels[-1], value, key=counts.__getitem__)
        else:
            levels.append(value)
    return levels


def _first_jpeg(stored: Examples) -> str | None:
    """Finds the path of the first sampled mask that is a JPEG, empty if it was not read from a file; None without one.

    About 16 examples, evenly spaced, are read. A mask that is an array is no JPEG.
    """
    for index in range(0, len(stored), max(1, len(stored) // _HEADERS)):
        mask = stored[index].get("mask")
        if isinstance(mask, bytes) and mask.startswith(b"\xff\xd8"):
            return name_of(mask)
    return None
