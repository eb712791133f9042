import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config import Data
from mpjax.data import IGNORED, labelled_images
from mpjax.data.augment import prepare as prepare_batch
from mpjax.errors import UsageError


PLAIN = Data(crop_padding=0)
IMAGES = np.random.default_rng(0).integers(1, 256, (6, 5, 7, 3), np.uint8)
KEY = jax.random.key(0)


def prepare(images, config, key=None):
    batch = {"image": images, "label": jnp.zeros(len(images), jnp.int32)}
    return prepare_batch(batch, key, config=config, fields=labelled_images(1, images.shape[1:]))["image"]


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


@pytest.mark.slow
def test_padding_is_black_before_normalisation():
    white = jnp.full((64, 2, 2, 1), 255, jnp.uint8)
    out = prepare(white, Data(crop_padding=1, mean=(0.5,), std=(0.5,)), KEY)
    assert sorted({float(value) for value in out.ravel()}) == [-1.0, 1.0]


def test_reflected_edges_have_the_labels_of_their_pixels():
    images = jnp.asarray(IMAGES[..., :1])
    stored = images[..., 0].astype(jnp.int32)
    config = Data(crop_padding=2, crop_edges="reflect")
    out = prepare_batch({"image": images, "mask": stored}, KEY, config=config, fields={})
    assert (out["mask"] != stored).any()
    np.testing.assert_allclose(out["image"][..., 0] * 255, out["mask"], rtol=1e-5)


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


def test_labels_are_untouched_and_masks_move_with_their_images():
    images = jnp.asarray(IMAGES[..., :1])
    batch = {"image": images, "mask": images[..., 0].astype(jnp.int32)}
    out = prepare_batch(batch, KEY, config=Data(crop_padding=1, flip=True), fields={})
    inside = np.asarray(out["mask"]) != IGNORED
    assert inside.mean() < 1
    pixels = np.asarray(out["image"][..., 0])[inside] * 255
    np.testing.assert_allclose(pixels, np.asarray(out["mask"])[inside], rtol=1e-5)
    labels = jnp.array([2049], jnp.int32)
    out = prepare_batch({"image": images[:1], "label": labels}, KEY, config=PLAIN, fields={})
    assert out["label"] is labels


ALTERNATING = Data(crop_padding=0, flip=True, alternate_flips=True)


def test_the_images_that_a_batch_calls_mirrored_are_flipped_with_their_masks_whatever_the_key():
    images = jnp.asarray(IMAGES[:4])
    mirrored = jnp.array([True, False, False, True])
    batch = {"image": images, "mask": images[..., 0].astype(jnp.int32), "mirrored": mirrored}
    for key in (KEY, jax.random.key(1)):
        out = prepare_batch(batch, key, config=ALTERNATING, fields={})
        assert set(out) == {"image", "mask"}
        for number, flip in enumerate([True, False, False, True]):
            wanted = IMAGES[number, :, ::-1] if flip else IMAGES[number]
            np.testing.assert_allclose(out["image"][number], wanted / 255, rtol=1e-6)
            np.testing.assert_array_equal(out["mask"][number], wanted[..., 0])
    np.testing.assert_allclose(
        prepare_batch(batch, None, config=ALTERNATING, fields={})["image"], IMAGES[:4] / 255, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("mirrored", "got"),
    [({}, "got none"), ({"mirrored": jnp.zeros(5, bool)}, r"bool \(5,\)"), ({"mirrored": jnp.zeros(6)}, "got float32")],
)
def test_alternating_flips_need_to_be_told_what_to_flip(mirrored, got):
    batch = {"image": jnp.asarray(IMAGES), **mirrored}
    with pytest.raises(UsageError, match=r"--data.alternate_flips needs the field 'mirrored' of a batch, bool \(6,\)"):
        prepare_batch(batch, KEY, config=ALTERNATING, fields={})
    with pytest.raises(UsageError, match=got):
        prepare_batch(batch, KEY, config=ALTERNATING, fields={})
