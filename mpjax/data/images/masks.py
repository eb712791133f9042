"""Masks: decoded, and what their stored values mean: which is which class, and which is ignored."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.examples import Example, Examples, array
from mpjax.data.fields import IGNORED
from mpjax.data.images.decoding import decoding, name_of, opened
from mpjax.errors import DataWarning, UsageError


def class_numbers(stored: Any) -> Any:
    """The class number of each pixel of an encoded mask, [H, W, 1]; an array is what it is.

    A palette is left alone: the numbers are the classes, its colours are for looking at (as in Pascal VOC's masks).

    Args:
      stored: an encoded image, or an array.

    Raises:
      UsageError: it is no image, or a colour image.
    """
    if not isinstance(stored, bytes):
        return stored
    with decoding(stored, "mask"):
        picture = opened(stored)
        pixels = np.asarray(picture)
    if pixels.ndim != 2:
        raise UsageError(
            f"{name_of(stored) or 'mask'}: a colour image (Pillow's mode {picture.mode}); wanted one channel of class "
            "numbers; convert the masks, each colour to its class"
        )
    return pixels.astype(np.uint8)[..., None] if pixels.dtype == np.bool_ else pixels[..., None]


@dataclasses.dataclass(frozen=True)
class DecodedMasks:
    """Examples whose `mask` is class numbers, whatever it is stored as."""

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return _decoded(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [_decoded(example) for example in self.examples.__getitems__(indices)]


def _decoded(example: Example) -> Example:
    return {**example, "mask": class_numbers(example["mask"])}


_LOOKED_AT = 256
"""How many masks, spread over the training split, tell which values there are."""


@dataclasses.dataclass(frozen=True)
class MaskValues:
    """The meaning of stored values.

    Attributes:
      classes: the stored value of each class, from class 0.
      ignored: the stored values of pixels that do not count.
      name: of the data set, for messages.
    """

    classes: tuple[int, ...]
    ignored: tuple[int, ...]
    name: str

    def class_numbers(self, mask: np.ndarray) -> np.ndarray:
        """uint8 of the shape of `mask`: class numbers, and `IGNORED` where a pixel does not count.

        Raises:
          UsageError: a value has no meaning.
        """
        values, meanings = self._sorted
        if mask.dtype == np.uint8:
            place = self._places[mask]
        else:
            place = np.searchsorted(values, mask).clip(max=len(values) - 1)
        if (values[place] != mask).any():
            strange = int(mask[values[place] != mask].flat[0])
            besides = f", nor {_listed(self.ignored)}, which does not count" if self.ignored else ""
            raise UsageError(
                f"mask: value {strange} of '{self.name}' is none of {_listed(self.classes)}{besides}; "
                f"{_advice(strange)}"
            )
        return meanings[place]

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The known values in ascending order, and what each is."""
        meanings = {value: number for number, value in enumerate(self.classes)} | dict.fromkeys(self.ignored, IGNORED)
        values = sorted(meanings)
        return np.asarray(values), np.asarray([meanings[value] for value in values], np.uint8)

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """For each byte, where it would stand among the known values: a table is much faster than a search."""
        return np.searchsorted(self._sorted[0], np.arange(256)).clip(max=len(self._sorted[0]) - 1)


@dataclasses.dataclass(frozen=True)
class ClassMasks:
    """Examples whose `mask` is class numbers and `IGNORED`."""

    examples: Examples
    values: MaskValues

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self._mapped(self.examples[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._mapped(example) for example in self.examples.__getitems__(indices)]

    def _mapped(self, example: Example) -> Example:
        if "mask" not in example:
            return example  # the contract tells what is missing
        return {**example, "mask": self.values.class_numbers(_integers(example["mask"]))}


def mask_values(train: Examples, num_classes: int, config: Data, name: str) -> MaskValues:
    """The meaning of the stored values, as the settings say it or as the masks of the training split have it.

    Masks of class numbers mean themselves. Where the stored values are others, and exactly as many as classes, they are
    the classes in ascending order; that is told, and so is a class that no mask has, and masks most of which do not
    count.

    Args:
      train: the examples of the training split, their masks decoded.
      num_classes: of the task.
      config: `mask_values` and `ignore_index`.
      name: of the data set.

    Raises:
      UsageError: the stored values are not known to be classes; settings that contradict each other.
    """
    given, ignored = tuple(config.mask_values), tuple(config.ignore_index)
    if given and (len(given) != num_classes or len(set(given)) != len(given) or set(ignored) & set(given)):
        besides = f", none of them in --data.ignore_index {' '.join(map(str, ignored))}" if ignored else ""
        raise UsageError(
            f"--data.mask_values {' '.join(map(str, given))}: wanted {num_classes} different values, one for each "
            f"class{besides}"
        )
    indices = sorted({int(i) for i in np.linspace(0, len(train) - 1, _LOOKED_AT)}) if len(train) else []
    counts: dict[int, int] = {}
    for index in indices:
        example = train[index]
        if "mask" in example:
            for value, count in zip(*np.unique(_integers(example["mask"]), return_counts=True), strict=True):
                counts[int(value)] = counts.get(int(value), 0) + int(count)
    seen = sorted(set(counts) - set(ignored))
    looked_at = f"in {len(indices)} of {len(train)} masks of '{name}'"
    classes = given or tuple(range(num_classes))
    if not given and not set(seen) <= set(classes):
        if len(seen) != num_classes:
            raise UsageError(
                f"mask: the stored values {looked_at} are {_listed(seen)}, and the {num_classes} classes of the task "
                f"are 0 to {num_classes - 1}; {_advice(seen[-1])}"
            )
        classes = tuple(seen)
        _tell(f"the stored values {_listed(seen)} are taken as classes 0 to {num_classes - 1}: as many {looked_at}")
    values = MaskValues(classes, ignored, name)
    if not counts:
        return values
    if missing := [str(number) for number, value in enumerate(classes) if value not in {*counts, *ignored}]:
        _tell(f"class {', '.join(missing)} of {num_classes} does not occur {looked_at}")
    share = sum(counts.get(value, 0) for value in ignored) / sum(counts.values())
    if share > 0.5:
        _tell(f"{share:.0%} of the pixels do not count, by --data.ignore_index {_listed(ignored)}, {looked_at}")
    return values


def _integers(mask) -> np.ndarray:
    found = array("mask", mask)
    if not np.issubdtype(found.dtype, np.integer):
        raise UsageError(
            f"mask: dtype {found.dtype}; wanted integers; write mask.astype(np.int32) in the function of "
            "--data.preprocess, and mask.argmax(-1) for one-hot masks"
        )
    return found


def _tell(text: str) -> None:
    warnings.warn(f"mask: {text}", DataWarning, stacklevel=2)


def _advice(value: int) -> str:
    return (
        "write --data.mask_values with the stored value of each class, as in --data.mask_values 0 255, or "
        f"--data.ignore_index {value} if pixels of that value do not count"
    )


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return shown if len(values) <= 8 else f"{shown} and {len(values) - 8} more"
