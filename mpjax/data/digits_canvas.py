"""The data set of the default segmentation task: handwritten digits put on a canvas, and which pixel is whose."""

import pathlib

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from mpjax.data.digits import CITATION, HOMEPAGE, digits_of
from mpjax.data.generated import write_once


SIZE = 32
CLASSES = 11  # the background and ten digits
TRAIN, TEST = 2000, 400
DIGITS = (2, 5)  # how many on a canvas, from and below
TRIES = 1000  # then a digit is left out: where two or three lie badly there is no room for another
SIDES = (9, 15)  # of a digit, in pixels, from and below
INK = 96  # a pixel at least this bright is the digit's

_DESCRIPTION = """Two to four handwritten digits on a black canvas of 32x32 pixels, at random places and in sizes from
9x9 to 14x14, none on top of another. The mask says of each pixel which digit it is ink of: 0 is background and
1 to 10 are the digits 0 to 9. Made of the 1,797 digits that scikit-learn ships, without their test split for training
and of their test split for testing; the same on every machine.
From the UCI Machine Learning Repository, licensed under CC BY 4.0."""


class DigitsCanvas(tfds.core.GeneratorBasedBuilder):
    """Composed UCI digits: image uint8 [32, 32, 1], mask uint8 [32, 32] of 11 classes; 2,000 train and 400 test."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    # Not features.Image: encoding one needs TensorFlow.
                    "image": tfds.features.Tensor(shape=(SIZE, SIZE, 1), dtype=np.uint8),
                    "mask": tfds.features.Tensor(shape=(SIZE, SIZE), dtype=np.uint8),
                }
            ),
            supervised_keys=("image", "mask"),
            homepage=HOMEPAGE,
            citation=CITATION,
            disable_shuffling=True,
        )

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
    """One canvas.

    Args:
      digits: uint8 pixels [8, 8] and labels, to draw from.
      random: moves on.

    Returns:
      The image and the mask, both uint8 [32, 32].
    """
    image, mask = np.zeros((SIZE, SIZE), np.uint8), np.zeros((SIZE, SIZE), np.uint8)
    taken = np.zeros((SIZE, SIZE), bool)
    wanted = int(random.integers(*DIGITS))
    for _ in range(TRIES):
        if wanted == 0:
            break
        pixels, label = digits[int(random.integers(len(digits)))]
        side = int(random.integers(*SIDES))
        top, left = (int(place) for place in random.integers(0, SIZE - side + 1, 2))
        place = np.s_[top : top + side, left : left + side]
        if taken[place].any():
            continue
        digit = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))
        taken[place] = True
        image[place] = digit
        mask[place] = np.where(digit >= INK, label + 1, 0)
        wanted -= 1
    return image, mask


def prepare_digits_canvas(data_dir: pathlib.Path) -> None:
    """Writes the set below `data_dir` as array_record files, unless it is there; see `write_once`."""
    write_once(DigitsCanvas(data_dir=data_dir, file_format="array_record"))
