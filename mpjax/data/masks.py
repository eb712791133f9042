"""From an encoded mask to the class numbers in it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.data.examples import Example, Examples
from mpjax.data.images import decoding, name_of, opened
from mpjax.errors import UsageError


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
