"""Affine moves, against Pillow's with nearest pixels."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mpjax.data.augment import rotation, shear, translation, warp


IMAGE = np.random.default_rng(0).integers(0, 256, (32, 45, 3), np.uint8)
PICTURE = Image.fromarray(IMAGE)
FILL = (128, 128, 128)


def one(value):
    return jnp.array([value], jnp.float32)


def moved(moves):
    return np.asarray(warp(jnp.asarray(IMAGE)[None], moves, 128)[0])


def affine(*entries):
    return np.asarray(PICTURE.transform(PICTURE.size, Image.Transform.AFFINE, entries, fillcolor=FILL))


@pytest.mark.parametrize("factor", [-0.3, -0.11, 0.27])
def test_shear_equals_pillows(factor):
    np.testing.assert_array_equal(moved(shear(one(factor), one(0))), affine(1, factor, 0, 0, 1, 0))
    np.testing.assert_array_equal(moved(shear(one(0), one(factor))), affine(1, 0, 0, factor, 1, 0))


@pytest.mark.parametrize("pixels", [-14.2, -1.0, 3.3, 50.0])
def test_translation_equals_pillows(pixels):
    np.testing.assert_array_equal(moved(translation(one(pixels), one(0))), affine(1, 0, pixels, 0, 1, 0))
    np.testing.assert_array_equal(moved(translation(one(0), one(pixels))), affine(1, 0, 0, 0, 1, pixels))


@pytest.mark.parametrize("degrees", [-30.0, -7.5, 12.0, 30.0])
def test_rotation_equals_pillows_but_for_pixels_on_an_edge(degrees):
    differs = (moved(rotation(one(degrees), 32, 45)) != np.asarray(PICTURE.rotate(degrees, fillcolor=FILL))).any(-1)
    assert differs.mean() < 0.005


def test_no_move_is_the_image():
    np.testing.assert_array_equal(moved(shear(one(0), one(0))), IMAGE)
    np.testing.assert_array_equal(moved(rotation(one(0), 32, 45)), IMAGE)


def test_masks_move_as_their_images_and_keep_their_dtype():
    for dtype in (np.uint8, np.int32):
        mask = warp(jnp.asarray(IMAGE[..., 0].astype(dtype))[None], rotation(one(20), 32, 45), 7)[0]
        image = moved(rotation(one(20), 32, 45))
        outside = (warp(jnp.zeros((1, 32, 45), jnp.uint8), rotation(one(20), 32, 45), 1) == 1)[0]
        assert mask.dtype == dtype
        np.testing.assert_array_equal(mask, np.where(outside, 7, image[..., 0]))
        assert 0.05 < np.asarray(outside).mean() < 0.4
