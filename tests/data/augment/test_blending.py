"""Color and sharpness, against Pillow's."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from mpjax.data.augment import blend, gray, gray_images, smooth


IMAGE = np.random.default_rng(0).integers(0, 256, (33, 21, 3), np.uint8)
PICTURE = Image.fromarray(IMAGE)
FACTORS = [0.0, 0.1, 0.55, 1.0, 1.3, 1.9]


def blended(dull, factor):
    images = jnp.asarray(IMAGE)[None]
    out = blend(dull(images), images, jnp.full((1, 1, 1, 1), factor))
    assert out.dtype == jnp.uint8
    return np.asarray(out[0], int)


def test_gray_equals_pillows():
    np.testing.assert_array_equal(gray(jnp.asarray(IMAGE)[None])[0], np.asarray(PICTURE.convert("L"), np.int32))


def test_one_channel_is_its_own_gray():
    images = jnp.asarray(IMAGE[None, ..., :1])
    np.testing.assert_array_equal(gray_images(images), images)


def test_smoothing_equals_pillows():
    np.testing.assert_array_equal(smooth(jnp.asarray(IMAGE)[None])[0], PICTURE.filter(ImageFilter.SMOOTH))


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (1, 7)])
def test_images_that_are_all_border_stay(shape):
    images = jnp.asarray(IMAGE[None, : shape[0], : shape[1]])
    np.testing.assert_array_equal(smooth(images), images)


@pytest.mark.parametrize("factor", FACTORS)
def test_color_and_sharpness_are_within_a_level_of_pillows(factor):
    color = np.asarray(ImageEnhance.Color(PICTURE).enhance(factor), int)
    assert np.abs(blended(gray_images, factor) - color).max() <= 1
    sharp = np.asarray(ImageEnhance.Sharpness(PICTURE).enhance(factor), int)
    assert np.abs(blended(smooth, factor) - sharp).max() <= 1


def test_a_factor_of_one_is_the_image():
    np.testing.assert_array_equal(blended(smooth, 1.0), IMAGE)
