import dataclasses

import jax
import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import Portion, Reader, SplitOfOne, fits_in_memory, labelled_images, read_all, read_batch, reader
from mpjax.data.sources import synthetic_source
from mpjax.errors import UsageError


SOURCE = synthetic_source(3, (8, 6, 3), 1100)
VARYING = dataclasses.replace(SOURCE, fields=labelled_images(3, (None, None, 3)))


class List(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_all_of_a_split_in_its_order():
    images, labels = read_all(SplitOfOne(SOURCE.train, reader(SOURCE, Data(), training=True)), workers=2).values()
    assert (images.shape, images.dtype) == ((1100, 8, 6, 3), np.uint8)
    assert labels.tolist() == [index % 3 for index in range(1100)]
    np.testing.assert_array_equal(images[1099], SOURCE.train[1099]["image"])


def test_float64_images_are_held_as_float32():
    examples = List([{"image": np.full((1, 1, 1), 0.25), "label": 0}] * 3)
    images, labels = read_all(SplitOfOne(examples, Reader(labelled_images(1, (1, 1, 1)), None)), workers=0).values()
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    assert images.ravel().tolist() == [0.25] * 3


def test_one_bad_example_among_many_is_refused():
    examples = List([{"image": np.zeros((1, 1, 1)), "label": 0}] * 600)
    examples[599] = {"image": np.full((1, 1, 1), np.nan), "label": 0}
    with pytest.raises(UsageError, match="image: 1 of 1 values are not finite"):
        read_all(SplitOfOne(examples, Reader(labelled_images(1, (1, 1, 1)), None)), workers=2)


def test_memory_is_counted_over_both_splits():
    # 2,200 images of 8 x 6 x 3 bytes, and labels of 4: 325,600.
    read = reader(SOURCE, Data(), training=True)
    assert fits_in_memory(SOURCE, Data(in_memory_mb=1), read)
    large = reader(SOURCE, Data(image_size=13), training=True)  # 1,124,200 bytes
    assert not fits_in_memory(SOURCE, Data(in_memory_mb=1), large)
    assert not fits_in_memory(VARYING, Data(), read)


def test_memory_is_counted_over_all_sets_of_a_mixture():
    read = reader(SOURCE, Data(image_size=9), training=True)  # 543,400 bytes
    assert fits_in_memory(SOURCE, Data(in_memory_mb=1), read)
    two = (Portion(SOURCE, 0.1), Portion(SOURCE, 0.1))  # 1,100 images each, of their training splits alone
    assert not fits_in_memory(dataclasses.replace(SOURCE, mix=two), Data(in_memory_mb=1), read)
    assert fits_in_memory(dataclasses.replace(SOURCE, mix=two[:1]), Data(in_memory_mb=1), read)
    assert not fits_in_memory(dataclasses.replace(SOURCE, mix=(Portion(VARYING, 0.1),)), Data(), read)


def test_a_batch_reaches_the_device_without_a_copy():
    batch = read_batch(SOURCE.train, range(3), reader(SOURCE, Data(), training=True))
    assert [value.ctypes.data % 64 for value in batch.values()] == [0, 0]
    placed = jax.device_put(batch)
    assert [placed[name].unsafe_buffer_pointer() for name in batch] == [batch[name].ctypes.data for name in batch]


def some_floats(count, odd):
    images = [np.full((1, 1, 1), 200, np.uint8)] * count
    images[odd] = np.full((1, 1, 1), 0.5)
    return List([{"image": image, "label": 0} for image in images])


@pytest.mark.parametrize("odd", [3, 700])
def test_an_image_of_another_dtype_than_the_others_is_refused(odd):
    """Kept as uint8 it would be black; as float32 among them, 255 times too dark."""
    read = Reader(labelled_images(1, (1, 1, 1)), None, "split 'train' of 'mine'")
    wanted = f"image: example {odd} of split 'train' of 'mine' is float32, others are uint8; wanted one dtype"
    with pytest.raises(UsageError, match=wanted):
        read_all(SplitOfOne(some_floats(1024, odd), read), workers=2)


def test_a_bad_example_is_named():
    read = reader(SOURCE, Data(), training=False)
    examples = List([{"image": np.zeros((8, 6, 3), np.uint8), "label": label} for label in (0, 1, 7)])
    with pytest.raises(
        UsageError, match=r"label: 7 is outside \[0, 3\).* \(example 2 of split 'test' of 'synthetic'\)"
    ):
        read_batch(examples, [0, 2], read)


def test_the_headers_of_a_batch_are_read_before_any_image_is_decoded(monkeypatch):
    done = []

    def frame(width, height, drawn):
        done.append("crop")
        return (0.0, 0.0, 1.0, 1.0)

    def resize(picture, box, out):
        out[:] = len(done)
        done.append("decode")

    examples = List({"image": np.zeros((1, 1, 1), np.uint8), "label": 0} for _ in range(2))
    batch = read_batch(examples, [0, 1], Reader(labelled_images(1, (1, 1, 1)), frame, resize=resize))
    assert done == ["crop", "crop", "decode", "decode"]
    np.testing.assert_array_equal(batch["image"].ravel(), [2, 3])
