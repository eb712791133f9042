import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config.schema import Data
from mpjax.data.augment import prepare, random_crop, random_flip
from mpjax.errors import UsageError


PLAIN = Data(crop_padding=0)
IMAGES = np.random.default_rng(0).integers(1, 256, (6, 5, 7, 3), np.uint8)
KEY = jax.random.key(0)


def test_uint8_is_scaled_to_0_to_1():
    out = prepare(jnp.array([[[[0], [51], [255]]]], jnp.uint8), PLAIN)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.ravel(), [0, 0.2, 1], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_floating_images_are_taken_as_they_are(dtype):
    out = prepare(jnp.full((1, 2, 2, 1), 1.5, dtype), PLAIN)
    assert out.dtype == jnp.float32
    assert out.ravel().tolist() == [1.5] * 4


def test_normalisation_per_channel():
    out = prepare(jnp.full((1, 1, 1, 3), 255, jnp.uint8), Data(mean=(0.5, 0.0, 1.0), std=(0.25, 2.0, 1.0)))
    assert out.ravel().tolist() == [2.0, 0.5, 0.0]


def test_one_mean_serves_all_channels():
    out = prepare(jnp.full((1, 1, 1, 3), 255, jnp.uint8), Data(mean=(0.5,), std=(0.5,)))
    assert out.ravel().tolist() == [1.0, 1.0, 1.0]


def test_no_augmentation_without_a_key():
    config = Data(crop_padding=2, flip=True)
    np.testing.assert_allclose(prepare(jnp.asarray(IMAGES), config), IMAGES / 255, rtol=1e-6)


def test_random_crop_is_a_loop_over_offsets():
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    offsets = np.asarray(jax.random.randint(KEY, (6, 2), 0, 5))
    wanted = [image[top : top + 5, left : left + 7] for image, (top, left) in zip(padded, offsets, strict=True)]
    np.testing.assert_array_equal(random_crop(jnp.asarray(IMAGES), 2, KEY), np.stack(wanted))


def test_every_offset_occurs_alike():
    one = jnp.zeros((9000, 3, 3, 1), jnp.uint8).at[:, 1, 1].set(1)
    share = np.asarray(random_crop(one, 1, KEY), np.float32)[..., 0].mean(0)
    np.testing.assert_allclose(share, np.full((3, 3), 1 / 9), atol=0.012)


def test_random_flip_mirrors_half_of_the_images_left_to_right():
    images = jnp.tile(jnp.asarray(IMAGES[:1]), (2000, 1, 1, 1))
    out = np.asarray(random_flip(images, KEY))
    flipped = (out == IMAGES[0, :, ::-1]).all((1, 2, 3))
    kept = (out == IMAGES[0]).all((1, 2, 3))
    assert (flipped ^ kept).all()
    assert 0.46 < flipped.mean() < 0.54


def test_padding_is_black_before_normalisation():
    white = jnp.full((64, 2, 2, 1), 255, jnp.uint8)
    out = prepare(white, Data(crop_padding=1, mean=(0.5,), std=(0.5,)), KEY)
    assert sorted({float(value) for value in out.ravel()}) == [-1.0, 1.0]


def test_a_key_gives_the_same_images_again_and_another_key_others():
    config = Data(crop_padding=1, flip=True)
    once = prepare(jnp.asarray(IMAGES), config, KEY)
    np.testing.assert_array_equal(once, prepare(jnp.asarray(IMAGES), config, KEY))
    assert (once != prepare(jnp.asarray(IMAGES), config, jax.random.key(1))).any()


def test_jit_does_not_change_what_is_drawn():
    config = Data(crop_padding=1, flip=True, mean=(0.4,), std=(0.3,))
    jitted = jax.jit(lambda images, key: prepare(images, config, key))
    np.testing.assert_allclose(
        jitted(jnp.asarray(IMAGES), KEY), prepare(jnp.asarray(IMAGES), config, KEY), rtol=1e-6, atol=1e-6
    )


def test_raw_keys_serve_too():
    assert prepare(jnp.asarray(IMAGES), Data(flip=True), jax.random.PRNGKey(0)).shape == IMAGES.shape


@pytest.mark.parametrize(
    ("images", "config", "says"),
    [
        (
            IMAGES,
            Data(mean=(0.5, 0.5)),
            r"data.mean: got 2 values \(0.5, 0.5\) for images of 3 channels; wanted one for all or one per channel",
        ),
        (IMAGES, Data(std=(1.0, 0.0, 1.0)), "data.std: .*wanted values above 0"),
        (IMAGES[0], PLAIN, r"image: got uint8 \(5, 7, 3\); wanted uint8 or floating \[B, H, W, C\]"),
        (IMAGES.astype(np.int32), PLAIN, "image: got int32"),
    ],
)
def test_refusals(images, config, says):
    with pytest.raises(UsageError, match=says):
        prepare(jnp.asarray(images), config)
