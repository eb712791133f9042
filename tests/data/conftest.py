"""Small prepared data sets."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image


class _Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    FEATURES: dict
    TRAIN, TEST = 10, 3

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(self.FEATURES),
            description="tiny",
            homepage="https://example.org",
            citation="none",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(self.TRAIN), "test": self._generate_examples(self.TEST)}

    def _generate_examples(self, count):
        for index in range(count):
            yield index, self.example(index)


class TinyTensor(_Tiny):
    """Image i is filled with i and has label i % 3."""

    FEATURES = {  # noqa: RUF012
        "image": tfds.features.Tensor(shape=(4, 4, 3), dtype=np.uint8),
        "label": tfds.features.ClassLabel(num_classes=3),
        "note": tfds.features.Text(),
    }

    def example(self, index):
        return {"image": np.full((4, 4, 3), index, np.uint8), "label": index % 3, "note": "unused"}


class TinyJpeg(_Tiny):
    """JPEG images that vary in size; every third is grayscale, every fourth CMYK."""

    FEATURES = {  # noqa: RUF012
        "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(num_classes=3),
    }

    def example(self, index):
        mode = "L" if index % 3 == 0 else "CMYK" if index % 4 == 1 else "RGB"
        picture = Image.new(mode, (30, 20 + index), 20 * index if mode == "L" else (20 * index,) * len(mode))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG")
        return {"image": buffer.getvalue(), "label": index % 3}


class TinyText(_Tiny):
    FEATURES = {"sentence": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2)}  # noqa: RUF012

    def example(self, index):
        return {"sentence": "a", "label": index % 2}


@pytest.fixture(scope="session")
def tiny_sets(tmp_path_factory):
    """A folder of the sets above, whose code is not registered any more, as on a machine they were copied to."""
    folder = tmp_path_factory.mktemp("data")
    tfds.disable_progress_bar()
    for builder in (TinyTensor, TinyJpeg, TinyText):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    for info in folder.glob("*/*/dataset_info.json"):
        info.write_text(info.read_text().replace(__name__, "gone"))
    return folder
