"""Writes the default data sets: handwritten digits from scikit-learn, for classification and for segmentation."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from mpjax.data.sources.generated import prepare


TEST_EVERY = 5
HOMEPAGE = "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits"

_DESCRIPTION = """Handwritten digits of 43 people, as 8x8 grayscale images with 17 levels, here stretched to 0..255.
These are the 1,797 images of the original's test set that scikit-learn ships; every fifth is the test split here.
From the UCI Machine Learning Repository, licensed under CC BY 4.0."""

CITATION = """@misc{alpaydin1998optical,
  author = {Alpaydin, E. and Kaynak, C.},
  title = {Optical Recognition of Handwritten Digits},
  year = {1998},
  publisher = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49}
}"""


def _described(builder: tfds.core.DatasetBuilder, description: str, features: dict) -> tfds.core.DatasetInfo:
    """Builds the `DatasetInfo` of a set. The first of `features` is the input, the second the target."""
    return tfds.core.DatasetInfo(
        builder=builder,
        description=description,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=tuple(features),
        homepage=HOMEPAGE,
        citation=CITATION,
        disable_shuffling=True,
    )


class Digits(tfds.core.GeneratorBasedBuilder):
    """Builder of `digits`: `image`, uint8 [8, 8, 1], and `label` in [0, 10); 1,437 training and 360 test examples."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        # Not features.Image: encoding one needs TensorFlow.
        features = {
            "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return _described(self, _DESCRIPTION, features)

    def _split_generators(self, dl_manager):
        del dl_manager  # scikit-learn has the data
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool):
        for index, pixels, label in digits_of(test):
            yield index, {"image": pixels[:, :, None], "label": label}


def digits_of(test: bool) -> Iterator[tuple[int, np.ndarray, int]]:
    """Yields the digits of the test split, or else of the training split, in order.

    Each is a tuple of its index in scikit-learn's set, its pixels, uint8 [8, 8], from 0 (black) to 255, and its label.
    Every fifth digit is in the test split.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if (index % TEST_EVERY == 0) == test:
            yield index, np.round(image * (255 / 16)).astype(np.uint8), int(label)


def prepare_digits(data_dir: pathlib.Path) -> None:
    """Writes the data set `digits` below `data_dir`, unless it exists. Raises as `prepare`."""
    prepare(Digits, data_dir)


SIZE = 32
CANVAS_CLASSES = 11  # the background and ten digits
TRAIN, TEST = 2000, 400
DIGITS = (2, 5)  # the number of digits on a canvas, half-open range
TRIES = 1000  # draws per canvas; digits that find no free place are left out
SIDES = (9, 15)  # the side of a digit in pixels, half-open range
INK = 96  # pixels at least this bright belong to the digit

_CANVAS_DESCRIPTION = """Two to four handwritten digits on a black canvas of 32x32 pixels, at random places and in sizes
from 9x9 to 14x14, none on top of another. The mask says of each pixel which digit it is ink of: 0 is background and
1 to 10 are the digits 0 to 9. Made of the 1,797 digits that scikit-learn ships, without their test split for training
and of their test split for testing; the same on every machine.
From the UCI Machine Learning Repository, licensed under CC BY 4.0."""


class DigitsCanvas(tfds.core.GeneratorBasedBuilder):
    """Builder of `digits_canvas`: `image`, uint8 [32, 32, 1], and `mask`, uint8 [32, 32], of 11 classes.

    Each image has several digits on black. There are 2,000 training and 400 test examples.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        # Not features.Image: encoding one needs TensorFlow.
        features = {
            "image": tfds.features.Tensor(shape=(SIZE, SIZE, 1), dtype=np.uint8),
            "mask": tfds.features.Tensor(shape=(SIZE, SIZE), dtype=np.uint8),
        }
        return _described(self, _CANVAS_DESCRIPTION, features)

    def _split_generators(self, dl_manager):
        del dl_manager  # scikit-learn has the data
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool):
        digits = [(pixels, label) for _, pixels, label in digits_of(test)]
        random = np.random.default_rng(int(test))
        for index in range(TEST if test else TRAIN):
            image, mask = compose(digits, random)
            yield index, {"image": image[:, :, None], "mask": mask}


def compose(digits: list[tuple[np.ndarray, int]], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws one image of two to four digits that do not overlap, and its mask.

    Digits are placed at random. If `TRIES` attempts do not find enough free places, the image has fewer digits.

    Args:
      digits: the digits to draw from, each with its pixels, uint8 [8, 8], and its label.
      random: the generator to draw with, which is advanced.

    Returns:
      The image and the mask, both uint8 [32, 32]. In the mask, 0 is background, and label + 1 marks the pixels of a
      digit that are at least `INK` bright.
    """
    image, mask = np.zeros((SIZE, SIZE), np.uint8), np.zeros((SIZE, SIZE), np.uint8)
    occupied = np.zeros((SIZE, SIZE), bool)
    remaining = int(random.integers(*DIGITS))
    for _ in range(TRIES):
        if remaining == 0:
            break
        pixels, label = digits[int(random.integers(len(digits)))]
        side = int(random.integers(*SIDES))
        top, left = (int(window) for window in random.integers(0, SIZE - side + 1, 2))
        window = np.s_[top : top + side, left : left + side]
        if occupied[window].any():
            continue
        digit = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))
        occupied[window] = True
        image[window] = digit
        mask[window] = np.where(digit >= INK, label + 1, 0)
        remaining -= 1
    return image, mask


def prepare_digits_canvas(data_dir: pathlib.Path) -> None:
    """Writes the data set `digits_canvas`, images of digits with masks, below `data_dir`, unless it exists.

    Raises as `prepare`.
    """
    prepare(DigitsCanvas, data_dir)
