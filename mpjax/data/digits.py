"""The data set of the default task: 1,797 handwritten digits that come with scikit-learn, so nothing is downloaded."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from mpjax.data.generated import write_once


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


class Digits(tfds.core.GeneratorBasedBuilder):
    """UCI handwritten digits: image uint8 [8, 8, 1], label in [0, 10); 1,437 train and 360 test examples."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    # Not features.Image: encoding one needs TensorFlow.
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage=HOMEPAGE,
            citation=CITATION,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # scikit-learn has the data
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool):
        for index, pixels, label in digits_of(test):
            yield index, {"image": pixels[:, :, None], "label": label}


def digits_of(test: bool) -> Iterator[tuple[int, np.ndarray, int]]:
    """The digits of the test split or of the other: place in the original, uint8 [8, 8] pixels, label."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if (index % TEST_EVERY == 0) == test:
            yield index, np.round(image * (255 / 16)).astype(np.uint8), int(label)


def prepare_digits(data_dir: pathlib.Path) -> None:
    """Writes the digits below `data_dir` as array_record files, unless they are there; see `write_once`."""
    write_once(Digits(data_dir=data_dir, file_format="array_record"))
