"""Composed digits: what is on a canvas, that the mask says so, and that both splits are apart."""

import hashlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mpjax.data.sources import CANVAS_CLASSES, DigitsCanvas, compose, digits_of, prepare_digits_canvas


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("canvas")
    prepare_digits_canvas(folder)
    return folder


@pytest.fixture(scope="module")
def splits(folder):
    builder = tfds.builder_from_directory(folder / "digits_canvas" / "1.0.0")
    sources = {name: builder.as_data_source(name) for name in ("train", "test")}
    return {
        name: tuple(np.stack([source[i][field] for i in range(len(source))]) for field in ("image", "mask"))
        for name, source in sources.items()
    }


@pytest.mark.slow
def test_sizes_shapes_and_dtypes(splits):
    for name, count in (("train", 2000), ("test", 400)):
        images, masks = splits[name]
        assert (images.shape, masks.shape) == ((count, 32, 32, 1), (count, 32, 32))
        assert (images.dtype, masks.dtype) == (np.uint8, np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_there_are_11_classes_of_which_the_background_takes_five_sixths(split, splits):
    share = np.bincount(splits[split][1].ravel(), minlength=11) / splits[split][1].size
    assert len(share) == CANVAS_CLASSES == 11
    assert 0.8 < share[0] < 0.9
    assert share[1:].min() > 0.008
    assert share[1:].max() < 0.025


@pytest.mark.slow
def test_the_mask_is_where_there_is_ink(splits):
    images, masks = splits["test"]
    np.testing.assert_array_equal(masks > 0, images[..., 0] >= 96)


def test_a_canvas_has_two_to_four_digits_in_several_sizes_and_none_on_another():
    """Of digits that are all ink, each in a class of its own, the canvas shows whole squares."""
    digits = [(np.full((8, 8), 255, np.uint8), label) for label in range(10)]
    random = np.random.default_rng(0)
    sides, counts = set(), []
    for _ in range(300):
        _, mask = compose(digits, random)
        counts.append(0)
        for label in np.unique(mask[mask > 0]):
            rows, columns = np.nonzero(mask == label)
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            if height == width and height < 15:  # else one digit was drawn twice
                assert len(rows) == height * width
                sides.add(int(height))
                counts[-1] += 1
    assert sides == set(range(9, 15))
    assert max(counts) == 4
    assert np.mean(counts) > 2


def test_digits_of_the_test_split_are_on_no_canvas_of_training():
    digits = {test: {pixels.tobytes() for _, pixels, _ in digits_of(test)} for test in (False, True)}
    assert not digits[False] & digits[True]
    assert (len(digits[False]), len(digits[True])) == (1437, 360)


@pytest.mark.slow
def test_every_machine_makes_the_same_masks(splits):
    digest = hashlib.sha256(splits["test"][1].tobytes()).hexdigest()
    assert digest[:16] == "eea98caa00c2ee7b"


@pytest.mark.slow
def test_opening_again_writes_nothing(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("written again")

    monkeypatch.setattr(DigitsCanvas, "download_and_prepare", refuse)
    prepare_digits_canvas(folder)
