"""Generates random images with one pattern per class, to try a configuration before its data is available."""

import dataclasses
import re

import numpy as np

from mpjax.data.examples import Example, Examples, Source, labelled_images, require_examples
from mpjax.errors import UsageError


NAME = "synthetic"
_PATTERN_SIDE = 4
_NOISE = 64


@dataclasses.dataclass(frozen=True)
class SyntheticExamples(Examples):
    """Random examples, generated on access: `image`, uint8 [H, W, C], and `label`, the index modulo the classes.

    An image is the pattern of its class plus noise, a pure function of the seed, the split (0: train, 1: test) and the
    index.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    size: int
    seed: int
    split: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        label = index % self.num_classes
        height, width, channels = self.image_shape
        # Each class is a few large squares of colour plus noise: low frequencies survive resizing and cropping.
        coarse = np.random.default_rng((self.seed, label)).integers(
            256 - _NOISE, size=(_PATTERN_SIDE, _PATTERN_SIDE, channels), dtype=np.uint8
        )
        rows, columns = (np.arange(side) * _PATTERN_SIDE // side for side in (height, width))
        pattern = coarse[rows[:, None], columns[None, :]]
        rng = np.random.default_rng((self.seed, self.num_classes + self.split, index))
        return {"image": pattern + rng.integers(_NOISE, size=self.image_shape, dtype=np.uint8), "label": label}


def synthetic_source(num_classes: int, image_shape: tuple[int, int, int], size: int, seed: int = 0) -> Source:
    """Builds a data set of random images, with a pattern per class that a model can learn; images are made on access.

    The training and the test split have the same patterns and different noise.

    Args:
      num_classes: the number of classes; each has one pattern.
      image_shape: (H, W, C) of the uint8 images.
      size: the number of examples in each split; the labels cycle through the classes.
      seed: the seed of the patterns and of the noise.

    Raises:
      UsageError: `size` is 0.
    """
    require_examples(NAME, size)
    train, test = (SyntheticExamples(num_classes, image_shape, size, seed, split) for split in (0, 1))
    return Source(NAME, labelled_images(num_classes, image_shape), train, test)


def parse_synthetic(name: str, size: int) -> Source:
    """Builds the data set of a name such as `synthetic:32x32x3:100` (height x width x channels : classes), with seed 0.

    Each split has `size` examples.

    >>> parse_synthetic("synthetic:8x8x1:10", size=100).train[3]["image"].shape
    (8, 8, 1)

    Raises:
      UsageError: the name has another form, one of its numbers is 0, or `size` is 0.
    """
    match = re.fullmatch(rf"{NAME}:([1-9]\d*)x([1-9]\d*)x([1-9]\d*):([1-9]\d*)", name)
    if not match:
        raise UsageError(
            f"data.name: got '{name}'; wanted synthetic:HEIGHTxWIDTHxCHANNELS:CLASSES, as in 'synthetic:32x32x3:100'"
        )
    height, width, channels, num_classes = (int(number) for number in match.groups())
    return synthetic_source(num_classes, (height, width, channels), size)
