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


class TinySst2(_Tiny):
    """What glue/sst2 has; the labels of its test split are hidden."""

    FEATURES = {  # noqa: RUF012
        "idx": tfds.features.Scalar(np.int32),
        "label": tfds.features.ClassLabel(names=["negative", "positive"]),
        "sentence": tfds.features.Text(),
    }

    def example(self, index):
        return {"idx": index, "label": index % 2, "sentence": "gut " * index}


class TinyPets(_Tiny):
    """What oxford_iiit_pet has: photographs that vary in size, trimaps of 1 to 3 as PNG, two kinds of labels."""

    FEATURES = {  # noqa: RUF012
        "file_name": tfds.features.Text(),
        "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(num_classes=37),
        "segmentation_mask": tfds.features.Image(shape=(None, None, 1), use_colormap=True),
        "species": tfds.features.ClassLabel(names=["Cat", "Dog"]),
    }

    def example(self, index):
        height, width = 12, 16 + index
        mask = np.full((height, width), 2, np.uint8)
        mask[3:9, 4:12] = 3
        mask[4:8, 5:11] = 1
        files = []
        for pixels, kind in ((np.stack([mask * 80] * 3, -1), "JPEG"), (mask, "PNG")):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, kind)
            files.append(buffer.getvalue())
        labels = {"label": index, "species": index % 2, "file_name": f"{index}.jpg"}
        return {"image": files[0], "segmentation_mask": files[1], **labels}


class TinyXray(_Tiny):
    """PNGs of 16 bits, filled with 300."""

    FEATURES = {  # noqa: RUF012
        "image": tfds.features.Image(shape=(4, 4, 1), dtype=np.uint16),
        "label": tfds.features.ClassLabel(num_classes=2),
    }

    def example(self, index):
        buffer = io.BytesIO()
        Image.fromarray(np.full((4, 4), 300, np.uint16)).save(buffer, "PNG")
        return {"image": buffer.getvalue(), "label": index % 2}


@pytest.fixture(scope="session")
def tiny_sets(tmp_path_factory):
    """A folder of the sets above, whose code is not registered any more, as on a machine they were copied to."""
    folder = tmp_path_factory.mktemp("data")
    tfds.disable_progress_bar()
    for builder in (TinyTensor, TinyJpeg, TinyText, TinySst2, TinyPets, TinyXray):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    for info in folder.glob("*/*/dataset_info.json"):
        info.write_text(info.read_text().replace(__name__, "gone"))
    return folder
