import dataclasses
import io

import numpy as np
import PIL.Image
import pytest

from mpjax.config import Data
from mpjax.data import Image, Mask, batch_fields, labelled_images, read_batch, reader
from mpjax.data.images import centre, draws, linear, random_part
from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError


SOURCE = synthetic_source(3, (8, 6, 3), 1100)
VARYING = dataclasses.replace(SOURCE, fields=labelled_images(3, (None, None, 3)))


def test_images_of_one_size_are_resized_whole():
    read = reader(SOURCE, Data(image_size=5), training=True)
    assert read.fields["image"].shape == (5, 5, 3)
    assert read.frame(6, 8, None) == centre()(6, 8, None)
    assert read_batch(SOURCE.train, [3, 4], read)["image"].shape == (2, 5, 5, 3)


def test_images_that_vary_are_cut_at_random_in_training_and_in_the_middle_in_evaluation():
    config = Data(image_size=224)
    assert reader(VARYING, config, training=True).frame is random_part
    assert reader(VARYING, config, training=False).frame(256, 256, None) == (16, 16, 240, 240)


def test_without_antialiasing_an_image_and_its_mask_are_cut_at_the_same_whole_pixels(monkeypatch):
    monkeypatch.setattr("mpjax.data.example_reader.require_packages", lambda: None)
    read = reader(VARYING, Data(image_size=224, antialias=False), training=True)
    assert read.resize is linear
    (drawn,) = draws(np.random.default_rng(7), 1)  # of (83.08, 14.05, 475.98, 326.67)
    assert read.frame(500, 375, drawn) == (83, 14, 476, 327)


def test_the_shape_of_images_in_a_batch():
    assert batch_fields(SOURCE, Data())["image"].shape == (8, 6, 3)
    assert batch_fields(VARYING, Data(image_size=5))["image"].shape == (5, 5, 3)


def test_images_that_vary_need_a_size():
    with pytest.raises(UsageError, match=r"images of several sizes, \(None, None, 3\).*--data.image_size 224"):
        reader(VARYING, Data(), training=True)


@pytest.mark.parametrize("side", [(4, 3), (16, 12)], ids=["smaller", "larger"])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_mask_of_another_size_than_its_image_is_an_error(side, encoded):
    """The crop is chosen in pixels of the image: cut out of a larger mask, it would be another part, without a word."""
    fields = {"image": Image((None, None, 3)), "mask": Mask((None, None), 2)}
    image, mask = np.zeros((8, 6, 3), np.uint8), np.zeros(side, np.uint8)
    example = {name: png(array) if encoded else array for name, array in (("image", image), ("mask", mask))}
    fits = example | {"mask": png(image[..., 0]) if encoded else image[..., 0]}
    read = reader(dataclasses.replace(SOURCE, fields=fields), Data(image_size=5), training=True)
    assert read.batch([fits, fits], numbers=[7, 8])["mask"].shape == (2, 5, 5)
    message = rf"mask has {side[1]}x{side[0]} pixels and image 6x8: .*one size.*example 8 of split 'train'"
    with pytest.raises(UsageError, match=message):
        read.batch([fits, example], numbers=[7, 8])


def png(array):
    file = io.BytesIO()
    PIL.Image.fromarray(array).save(file, "PNG")
    return file.getvalue()
