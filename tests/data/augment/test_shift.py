import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data import IGNORED
from mpjax.data.augment import random_flip, random_shift


IMAGES = np.random.default_rng(0).integers(1, IGNORED, (6, 5, 7, 3), np.uint8)
KEY = jax.random.key(0)


def test_random_shift_is_a_loop_over_offsets():
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    offsets = np.asarray(jax.random.randint(KEY, (6, 2), 0, 5))
    wanted = [image[top : top + 5, left : left + 7] for image, (top, left) in zip(padded, offsets, strict=True)]
    np.testing.assert_array_equal(random_shift(jnp.asarray(IMAGES), 2, KEY), np.stack(wanted))


@pytest.mark.parametrize("padding", [2, 6])  # 6: beyond the image's other edge, which reflects again
def test_a_shift_may_reflect_the_image_at_its_edges(padding):
    padded = np.pad(IMAGES, ((0, 0), (padding, padding), (padding, padding), (0, 0)), "reflect")
    offsets = np.asarray(jax.random.randint(KEY, (6, 2), 0, 2 * padding + 1))
    wanted = [image[top : top + 5, left : left + 7] for image, (top, left) in zip(padded, offsets, strict=True)]
    np.testing.assert_array_equal(random_shift(jnp.asarray(IMAGES), padding, KEY, fill=None), np.stack(wanted))


def test_every_offset_occurs_alike():
    one = jnp.zeros((9000, 3, 3, 1), jnp.uint8).at[:, 1, 1].set(1)
    share = np.asarray(random_shift(one, 1, KEY), np.float32)[..., 0].mean(0)
    np.testing.assert_allclose(share, np.full((3, 3), 1 / 9), atol=0.012)


def test_random_flip_mirrors_half_of_the_images_left_to_right():
    images = jnp.tile(jnp.asarray(IMAGES[:1]), (2000, 1, 1, 1))
    out = np.asarray(random_flip(images, KEY))
    flipped = (out == IMAGES[0, :, ::-1]).all((1, 2, 3))
    kept = (out == IMAGES[0]).all((1, 2, 3))
    assert (flipped ^ kept).all()
    assert 0.46 < flipped.mean() < 0.54


def test_a_mask_moves_with_its_image_and_what_moves_in_is_ignored():
    images = jnp.asarray(IMAGES[..., 0])
    moved = random_flip(random_shift(images, 2, KEY), KEY)
    masks = random_flip(random_shift(images.astype(jnp.int32), 2, KEY, fill=IGNORED), KEY)
    assert masks.dtype == jnp.int32
    inside = masks != IGNORED
    np.testing.assert_array_equal(jnp.where(inside, masks, 0), jnp.where(inside, moved, 0))
    assert (np.asarray(moved)[~np.asarray(inside)] == 0).all()
    assert 0.5 < inside.mean() < 1
