"""The data set of the default task: 1,797 handwritten digits that come with scikit-learn, so nothing is downloaded."""

import contextlib
import io
import pathlib
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import tqdm_utils


TEST_EVERY = 5

_DESCRIPTION = """Handwritten digits of 43 people, as 8x8 grayscale images with 17 levels, here stretched to 0..255.
These are the 1,797 images of the original's test set that scikit-learn ships; every fifth is the test split here.
From the UCI Machine Learning Repository, licensed under CC BY 4.0."""

_CITATION = """@misc{alpaydin1998optical,
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
            homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
            citation=_CITATION,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # scikit-learn has the data
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool):
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            if (index % TEST_EVERY == 0) == test:
                pixels = np.round(image * (255 / 16)).astype(np.uint8)[:, :, None]
                yield index, {"image": pixels, "label": int(label)}


def prepare_digits(data_dir: pathlib.Path) -> None:
    """Writes the digits below `data_dir` as array_record files, unless they are there.

    Safe to call from several processes at once and to kill: the files are written to a folder of their own, which is
    renamed when it is complete.
    """
    builder = Digits(data_dir=data_dir, file_format="array_record")
    if _complete(builder):
        return
    try:
        with _quiet():
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except OSError:
        # Another process renamed its copy, the same as ours, into place first.
        if not _complete(builder):
            raise


def _complete(builder: tfds.core.DatasetBuilder) -> bool:
    return (builder.data_path / "dataset_info.json").exists()


@contextlib.contextmanager
def _quiet():
    """Silences tfds's progress bars and its lines on standard output."""
    shown = tqdm_utils._active
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(shown)
