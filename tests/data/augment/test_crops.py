"""Random rectangles: their areas, their shapes, their places."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.data.augment import Boxes, random_boxes


MANY = 20_000


@functools.cache
def drawn(area=(0.08, 1.0), ratio=(3 / 4, 4 / 3), size=(100, 100), count=MANY):
    boxes = jax.jit(random_boxes, static_argnums=(1, 2, 3, 4))(jax.random.key(0), count, size, area, ratio)
    return Boxes(*map(np.asarray, boxes))


def test_a_box_is_whole_pixels_inside_the_image():
    boxes = drawn(size=(20, 31))
    assert {part.dtype for part in boxes} == {np.dtype("int32")}
    assert boxes.top.min() == 0
    assert boxes.left.min() == 0
    assert (boxes.top + boxes.height).max() == 20
    assert (boxes.left + boxes.width).max() == 31
    assert min(boxes.height.min(), boxes.width.min()) >= 1


def test_areas_that_always_fit_are_uniform():
    """Between 10 % and 50 %, with shapes that fit: mean 0.3, quartiles 0.2 and 0.4; whole sides add up to 0.71 %."""
    boxes = drawn(area=(0.1, 0.5))
    share = boxes.height * boxes.width / 10_000
    np.testing.assert_allclose(share.mean(), 0.3, atol=0.003)
    np.testing.assert_allclose(np.quantile(share, [0.25, 0.5, 0.75]), [0.2, 0.3, 0.4], atol=0.006)
    assert share.min() > 0.095
    assert share.max() < 0.508


def test_shapes_are_as_often_tall_as_wide_and_stay_within_the_ratio():
    boxes = drawn(area=(0.1, 0.5))
    ratio = boxes.height / boxes.width
    np.testing.assert_allclose(np.log(ratio).mean(), 0, atol=0.005)
    np.testing.assert_allclose(np.log(ratio).std(), 2 * np.log(4 / 3) / 12**0.5, rtol=0.03)
    assert ratio.min() > 0.71
    assert ratio.max() < 1.4


def test_places_are_uniform():
    boxes = drawn(area=(0.25, 0.25), ratio=(1.0, 1.0), size=(8, 8))
    assert (boxes.height == 4).all()
    np.testing.assert_allclose(np.bincount(boxes.top, minlength=5) / MANY, [0.2] * 5, atol=0.01)
    np.testing.assert_allclose(np.bincount(boxes.left, minlength=5) / MANY, [0.2] * 5, atol=0.01)
    assert abs(np.corrcoef(boxes.top, boxes.left)[0, 1]) < 0.03


def test_what_never_fits_is_cut_to_the_image():
    boxes = drawn(area=(0.9, 0.9), ratio=(1.0, 1.0), size=(2, 50), count=10)
    assert boxes.height.tolist() == [2] * 10
    assert boxes.width.tolist() == [9] * 10


def test_what_does_not_fit_is_drawn_again():
    """Three in ten do not fit a square, and cut would be as high or as wide as it."""
    boxes = drawn(area=(0.5, 1.0))
    full = (boxes.height == 100) | (boxes.width == 100)
    assert full.mean() < 0.05


def test_contained_pixels_by_hand():
    box = Boxes(*(jnp.array([value], jnp.int32) for value in (1, 2, 2, 1)))
    assert np.argwhere(np.asarray(box.contain(4, 4))[0]).tolist() == [[1, 2], [2, 2]]
