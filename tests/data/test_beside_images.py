"""Nothing that belongs to an image is left behind when the image moves: it moves too, or it is an error."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config import Data, PythonObject
from mpjax.data import Image, Label, Mask, Numbers, batch_fields, open_source
from mpjax.data.augment import preparation_of
from mpjax.errors import DataWarning, UsageError


IMAGE = Image((4, 4, 1))
FLOATS, INTEGERS = np.dtype(np.float32), np.dtype(np.int32)
DEPTH = Numbers((4, 4), FLOATS)

GEOMETRIC = [
    ({"crop_padding": 1}, "--data.crop_padding 0"),
    ({"flip": True}, "--data.no_flip"),
    ({"random_resized_crop": 0.5}, "--data.random_resized_crop 0"),
    ({"randaugment_ops": 2}, "--data.randaugment_ops 0"),
]


def config(**settings):
    return Data(**{"crop_padding": 0} | settings)


@pytest.mark.parametrize(("settings", "instead"), GEOMETRIC)
def test_a_field_that_would_not_move_with_its_image_is_an_error(settings, instead):
    with pytest.raises(UsageError, match=rf"the image moves, and depth \[4, 4\] would not; write {instead}, leave it"):
        preparation_of(config(**settings), {"image": IMAGE, "depth": DEPTH})


@pytest.mark.parametrize(
    "field",
    [Image((4, 4, 3)), Numbers((17, 2), FLOATS), Numbers((1, 4, 4), INTEGERS), Mask((4, 4), 3)],
    ids=["image", "keypoints", "channels first", "another mask"],
)
def test_any_field_of_two_or_more_axes_counts(field):
    with pytest.raises(UsageError, match="--data.flip: the image moves, and other "):
        preparation_of(config(flip=True), {"image": IMAGE, "other": field})


@pytest.mark.parametrize("field", [Numbers((4, 4), FLOATS), Numbers((2, 2), INTEGERS), Image((4, 4, 1))])
def test_a_mask_of_other_than_class_numbers_of_its_image_does_not_move(field):
    with pytest.raises(UsageError, match="the image moves, and mask "):
        preparation_of(config(flip=True), {"image": IMAGE, "mask": field})


@pytest.mark.parametrize("settings", [settings for settings, _ in GEOMETRIC])
def test_a_mask_of_class_numbers_and_numbers_of_an_example_are_fine(settings):
    fields = {"image": IMAGE, "mask": Numbers((4, 4), INTEGERS), "label": Label(3), "age": Numbers((), FLOATS)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preparation_of(config(**settings), fields)
        preparation_of(config(**settings), {"image": IMAGE, "mask": Mask((4, 4), 3)})


def test_a_box_that_stays_as_it_is_is_a_warning():
    fields = {"image": IMAGE, "box": Numbers((4,), FLOATS)}
    with pytest.warns(DataWarning, match=r"--data.flip: the image moves, and box \[4\] stays as it is"):
        preparation_of(config(flip=True), fields)


def test_the_default_of_the_task_own_moves_nothing_and_that_of_others_one_pixel():
    assert Data().for_task("own").padding == 0
    assert Data().for_task("classification").padding == 1
    assert Data(crop_padding=2).for_task("own").padding == 2
    fields = {"image": IMAGE, "depth": DEPTH}
    images = np.random.default_rng(0).integers(1, 256, (8, 4, 4, 1), np.uint8)
    batch = {"image": jnp.asarray(images), "depth": jnp.asarray(images[..., 0] / 255, jnp.float32)}
    out = preparation_of(Data().for_task("own"), fields)(batch, jax.random.key(0))
    np.testing.assert_allclose(out["image"][..., 0], out["depth"], atol=1e-7)


@pytest.mark.parametrize("settings", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"label": Numbers((), INTEGERS)}, "labels, which have no number of classes here; write --data.num_classes N"),
        ({}, "images are mixed with their labels, and these have none; write --data.mixup 0 --data.cutmix 0"),
        ({"label": Label(3), "age": Numbers((), FLOATS)}, r"image and label are mixed, and age \[\] would not be"),
        ({"label": Label(3), "mask": Mask((4, 4), 3)}, r"image and mask are mixed, and label \[\] would not be"),
    ],
)
def test_a_field_that_would_not_be_mixed_with_its_image_is_an_error(settings, fields, said):
    with pytest.raises(UsageError, match=said):
        preparation_of(config(**settings), {"image": IMAGE, **fields})


def test_what_is_mixed_with_its_image_is_fine():
    preparation_of(config(mixup=0.2, cutmix=1.0), {"image": IMAGE, "label": Label(3)})
    preparation_of(config(cutmix=1.0), {"image": IMAGE, "mask": Mask((4, 4), 3)})


@pytest.mark.parametrize("other", ["depth", "mask"])
def test_a_crop_on_the_host_beside_a_column_that_is_not_cropped_is_an_error(other):
    rows = [{"image": np.zeros((4, 4 + n, 1), np.uint8), other: np.zeros((2, 2), np.int32)} for n in range(4)]
    data = Data(name=PythonObject(lambda: (rows, rows)), image_size=2)
    with pytest.raises(UsageError, match=rf"--data.image_size 2: images are cropped, and {other} \[2, 2\] would not"):
        batch_fields(open_source(data, None, "own"), data)
    square = [{"image": np.zeros((4, 4, 1), np.uint8), other: np.zeros((2, 2), np.int32)}] * 4
    data = Data(name=PythonObject(lambda: (square, square)), image_size=2)
    assert batch_fields(open_source(data, None, "own"), data)["image"] == Image((2, 2, 1))
