"""RandAugment: each operation by its number, what an image gets, and masks that stay in register."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from mpjax.data.augment import OPERATIONS, apply_operations, randaugment
from mpjax.errors import UsageError


KEY = jax.random.key(0)
IMAGE = np.random.default_rng(0).integers(10, 240, (24, 24, 3), np.uint8)
PICTURE = Image.fromarray(IMAGE)
AFFINE = Image.Transform.AFFINE
augmented = jax.jit(randaugment, static_argnames=("operations", "magnitude", "mask_fill"))


def moved(*entries):
    return PICTURE.transform(PICTURE.size, AFFINE, entries, fillcolor=(128, 128, 128))


# At the strongest, in the direction of the plus sign.
STRONGEST = {
    "autocontrast": ImageOps.autocontrast(PICTURE),
    "equalize": ImageOps.equalize(PICTURE),
    "invert": ImageOps.invert(PICTURE),
    "solarize": ImageOps.solarize(PICTURE, 0),
    "posterize": ImageOps.posterize(PICTURE, 4),
    "brightness": ImageEnhance.Brightness(PICTURE).enhance(1.9),
    "contrast": ImageEnhance.Contrast(PICTURE).enhance(1.9),
    "color": ImageEnhance.Color(PICTURE).enhance(1.9),
    "sharpness": ImageEnhance.Sharpness(PICTURE).enhance(1.9),
    "rotate": PICTURE.rotate(30, fillcolor=(128, 128, 128)),
    "shear_x": moved(1, 0.3, 0, 0, 1, 0),
    "shear_y": moved(1, 0, 0, 0.3, 1, 0),
    "translate_x": moved(1, 0, 10.8, 0, 1, 0),
    "translate_y": moved(1, 0, 0, 0, 1, 10.8),
}


@pytest.fixture(scope="module")
def strongest():
    """One image of each operation."""
    count = len(OPERATIONS)
    images = jnp.tile(jnp.asarray(IMAGE)[None], (count, 1, 1, 1))
    out, _ = jax.jit(apply_operations)(images, None, jnp.arange(count, dtype=jnp.int32), jnp.ones(count))
    return dict(zip(OPERATIONS, np.asarray(out), strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows_within_a_level(name, strongest):
    difference = np.abs(strongest[name].astype(int) - np.asarray(STRONGEST[name]).astype(int)).max(-1)
    assert strongest[name].dtype == np.uint8
    if name == "rotate":  # a pixel whose origin is on the edge of two
        assert (difference > 0).mean() < 0.005
    else:
        assert difference.max() <= 1


@pytest.fixture(scope="module")
def many():
    """2,000 copies of the image, and what two operations made of them and of a mask of their red channel."""
    images = jnp.tile(jnp.asarray(IMAGE)[None], (2000, 1, 1, 1))
    out, mask = augmented(images, KEY, images[..., 0].astype(jnp.int32), operations=1, mask_fill=255)
    return np.asarray(out), np.asarray(mask)


@pytest.mark.slow
def test_every_operation_occurs_alike(many):
    """All strongest images of both directions are distinct but for autocontrast, equalize and invert."""
    kinds = [image.tobytes() for image in many[0]]
    counts = sorted(kinds.count(kind) / 2000 for kind in set(kinds))
    # Solarize and posterize, too, are one whichever the direction: 5 of one kind, 9 of two.
    assert len(counts) == 23
    np.testing.assert_allclose(counts[:18], [1 / 28] * 18, atol=0.014)
    np.testing.assert_allclose(counts[18:], [1 / 14] * 5, atol=0.02)


def test_masks_move_with_their_images_and_only_with_them(many):
    images, mask = many
    assert mask.dtype == np.int32
    moved = (mask != IMAGE[..., 0]).any((1, 2))
    assert moved.mean() == pytest.approx(5 / 14, abs=0.04)
    red = np.where(mask == 255, 128, mask)
    np.testing.assert_array_equal(images[moved][..., 0], red[moved])


@pytest.mark.slow
def test_magnitude_0_leaves_all_but_the_operations_without_a_strength(many):
    images = jnp.tile(jnp.asarray(IMAGE)[None], (2000, 1, 1, 1))
    out, mask = augmented(images, KEY, None, operations=1, magnitude=0.0)
    assert mask is None
    assert (np.asarray(out) == IMAGE).all((1, 2, 3)).mean() == pytest.approx(11 / 14, abs=0.03)


@pytest.mark.slow
def test_two_operations_change_more_than_one(many):
    images = jnp.tile(jnp.asarray(IMAGE)[None], (500, 1, 1, 1))
    out, _ = augmented(images, KEY)
    assert len({image.tobytes() for image in np.asarray(out)}) > 200


def test_one_trace_serves_every_key_and_gray_images_too():
    traces = []

    @jax.jit
    def step(images, key):
        traces.append(1)
        return randaugment(images, key)[0]

    images = jnp.tile(jnp.asarray(IMAGE[None, ..., :1]), (8, 1, 1, 1))
    first, second = (np.asarray(step(images, jax.random.key(seed))) for seed in range(2))
    assert len(traces) == 1
    assert (first.shape, first.dtype) == ((8, 24, 24, 1), np.uint8)
    assert (first != second).any()


@pytest.mark.parametrize(
    ("images", "magnitude", "says"),
    [
        (IMAGE[None].astype(np.float32), 9.0, "image: got float32 .*; RandAugment wants uint8"),
        (IMAGE[None, ..., :2], 9.0, r"image: got uint8 \(1, 24, 24, 2\)"),
        (IMAGE[None], 30.0, "magnitude: got 30.0; wanted a number from 0 to 10"),
    ],
)
def test_refusals(images, magnitude, says):
    with pytest.raises(UsageError, match=says):
        randaugment(jnp.asarray(images), KEY, magnitude=magnitude)
