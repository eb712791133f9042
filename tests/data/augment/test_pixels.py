"""Operations on levels, against Pillow's, level for level."""

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from mpjax.data.augment import (
    autocontrast,
    brightness,
    contrast,
    equalize,
    histogram,
    identity,
    invert,
    look_up,
    posterize,
    solarize,
)


RANDOM = np.random.default_rng(0)
IMAGES = {
    "any": RANDOM.integers(0, 256, (33, 21, 3), np.uint8),
    "dim": RANDOM.integers(40, 90, (64, 64, 3), np.uint8),
    "flat": np.full((8, 8, 3), 77, np.uint8),
    "two levels": np.where(RANDOM.random((40, 40, 3)) < 0.2, 10, 200).astype(np.uint8),
    "smooth": np.broadcast_to(np.arange(96, dtype=np.uint8)[None, :, None] * [2, 1, 0], (64, 96, 3)).astype(np.uint8),
    "gray": RANDOM.integers(5, 180, (16, 16, 1), np.uint8),
}


def pillow(image, operation):
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    return np.asarray(operation(picture)).reshape(image.shape)


def ours(image, make):
    images = jnp.asarray(image)[None]
    out = look_up(images, jnp.broadcast_to(make(images), (1, image.shape[-1], 256)))
    assert out.dtype == jnp.uint8
    return np.asarray(out[0])


def one(value, dtype=jnp.float32):
    return jnp.array([value], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_invert_autocontrast_and_equalize_equal_pillows(image):
    np.testing.assert_array_equal(ours(image, lambda images: invert()), pillow(image, ImageOps.invert))
    equalized = ours(image, lambda images: equalize(histogram(images)))
    np.testing.assert_array_equal(equalized, pillow(image, ImageOps.equalize))
    # Pillow works in floating point, where an integer may come out a little too small and lose a level.
    stretched = ours(image, lambda images: autocontrast(histogram(images)))
    assert np.abs(stretched.astype(int) - pillow(image, ImageOps.autocontrast).astype(int)).max() <= 1


@pytest.mark.parametrize("threshold", [0, 1, 100, 255, 256])
def test_solarize_equals_pillows(threshold):
    wanted = pillow(IMAGES["any"], lambda picture: ImageOps.solarize(picture, threshold))
    np.testing.assert_array_equal(ours(IMAGES["any"], lambda _: solarize(one(threshold, jnp.int32))), wanted)


@pytest.mark.parametrize("bits", [1, 4, 7, 8])
def test_posterize_equals_pillows(bits):
    wanted = pillow(IMAGES["any"], lambda picture: ImageOps.posterize(picture, bits))
    np.testing.assert_array_equal(ours(IMAGES["any"], lambda _: posterize(one(bits, jnp.int32))), wanted)


@pytest.mark.parametrize(
    "factor", [0.0, 0.55, 1.9, *(pytest.param(f, marks=pytest.mark.slow) for f in (0.1, 1.0, 1.3))]
)
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_brightness_and_contrast_are_within_a_level_of_pillows(image, factor):
    bright = ours(image, lambda _: brightness(one(factor))).astype(int)
    assert np.abs(bright - pillow(image, lambda picture: ImageEnhance.Brightness(picture).enhance(factor))).max() <= 1
    strong = ours(image, lambda images: contrast(images, one(factor))).astype(int)
    assert np.abs(strong - pillow(image, lambda picture: ImageEnhance.Contrast(picture).enhance(factor))).max() <= 1


def test_contrast_knows_the_mean_of_large_images():
    """511 times 4,204,544 pixels is above 2^31."""
    white = jnp.full((1, 2048, 2053, 1), 255, jnp.uint8)
    assert (np.asarray(contrast(white, one(0.0))) == 255).all()


def test_a_histogram_counts_levels_by_image_and_channel():
    images = np.stack([IMAGES["two levels"], 255 - IMAGES["two levels"]])
    counts = np.asarray(histogram(jnp.asarray(images)))
    assert counts.dtype == np.int32
    for image, by_channel in zip(images, counts, strict=True):
        for channel in range(3):
            assert by_channel[channel].tolist() == np.bincount(image[..., channel].ravel(), minlength=256).tolist()


def test_every_image_and_channel_has_its_own_table():
    table = jnp.stack([jnp.stack([identity()[0, 0], invert()[0, 0]]), jnp.zeros((2, 256), jnp.int32)])
    out = look_up(jnp.full((2, 1, 1, 2), 10, jnp.uint8), table)
    assert out.ravel().tolist() == [10, 245, 0, 0]
