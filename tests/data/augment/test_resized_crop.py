"""Random-resized crops: what PyTorch makes of the same boxes, and masks that stay in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data.augment import Boxes, random_resized_crop, resized, resized_mask


KEY = jax.random.key(0)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 20, 27, 3), np.uint8)
BOXES = [(0, 0, 20, 27), (3, 5, 10, 8), (19, 26, 1, 1), (2, 0, 18, 13)]


def boxes(rows=BOXES):
    return Boxes(*(jnp.array(column, jnp.int32) for column in zip(*rows, strict=True)))


def by_torch(images, mode, size, **options):
    torch = pytest.importorskip("torch")
    """Crop, then stretch, image by image."""
    out = []
    for image, (top, left, height, width) in zip(images, BOXES, strict=True):
        part = torch.tensor(image[top : top + height, left : left + width].astype(np.float32)).permute(2, 0, 1)[None]
        stretched = torch.nn.functional.interpolate(part, size, mode=mode, **options)
        out.append(stretched[0].permute(1, 2, 0).numpy())
    return np.stack(out)


@pytest.mark.parametrize("size", [(20, 27), (8, 8), (33, 40)])
@pytest.mark.extra
def test_floating_images_equal_pytorchs_bilinear_stretch(size):
    out = resized(jnp.asarray(IMAGES, jnp.float32), boxes(), size)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, by_torch(IMAGES, "bilinear", size, align_corners=False), atol=1e-2)


@pytest.mark.extra
def test_uint8_images_are_rounded_to_the_nearest_level():
    out = resized(jnp.asarray(IMAGES), boxes(), (16, 16))
    assert out.dtype == jnp.uint8
    exact = by_torch(IMAGES, "bilinear", (16, 16), align_corners=False)
    assert np.abs(np.asarray(out, np.float32) - exact).max() <= 0.502


@pytest.mark.parametrize("size", [(20, 27), (8, 8), (33, 40)])
@pytest.mark.extra
def test_masks_equal_pytorchs_nearest_stretch(size):
    masks = IMAGES[..., 0].astype(np.int32)
    out = resized_mask(jnp.asarray(masks), boxes(), size)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, by_torch(masks[..., None], "nearest-exact", size)[..., 0])


@pytest.mark.slow
def test_the_whole_image_at_its_size_is_the_image():
    whole = boxes([(0, 0, 20, 27)] * 4)
    np.testing.assert_array_equal(resized(jnp.asarray(IMAGES), whole, (20, 27)), IMAGES)
    np.testing.assert_array_equal(resized_mask(jnp.asarray(IMAGES[..., 0]), whole, (20, 27)), IMAGES[..., 0])


def test_images_and_masks_are_cut_alike():
    """A disc and its mask: after the crop they still agree but for the rim."""
    y, x = np.mgrid[:48, :48]
    disc = ((y - 20) ** 2 + (x - 28) ** 2 < 200).astype(np.uint8)
    discs = jnp.tile(jnp.asarray(disc)[None], (64, 1, 1))
    images, mask = jax.jit(random_resized_crop)(255 * discs[..., None], KEY, discs)
    assert mask is not None
    assert (images.shape, mask.shape) == ((64, 48, 48, 1), (64, 48, 48))
    assert (images.dtype, mask.dtype) == (jnp.uint8, jnp.uint8)
    agree = (np.asarray(images)[..., 0] > 127) == (np.asarray(mask) > 0)
    assert agree.mean() > 0.98
    assert np.asarray(mask).mean((1, 2)).std() > 0.1


@pytest.mark.slow
def test_crops_take_8_to_100_percent_of_an_image():
    """Of a ramp in both directions, a crop shows as much as its box is large.

    Areas are uniform up to 3/4; of larger ones a share of -ln(area) / ln(4/3) fits. That gives a mean of 0.478.
    """
    ramp = jnp.arange(64, dtype=jnp.float32)
    images = jnp.stack(jnp.broadcast_arrays(ramp[:, None], ramp[None, :]), axis=-1)
    out, mask = jax.jit(random_resized_crop)(jnp.tile(images[None], (4000, 1, 1, 1)), KEY)
    assert mask is None
    spans = np.asarray(out).max((1, 2)) - np.asarray(out).min((1, 2)) + 1
    share = spans.prod(1) / 64**2
    assert 0.07 < share.min() < 0.1
    assert share.max() == pytest.approx(1, abs=0.03)
    assert share.mean() == pytest.approx(0.478, abs=0.01)
    ratio = spans[:, 0] / spans[:, 1]
    assert 0.69 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.45


def test_another_size_comes_out_when_asked_for():
    jitted = jax.jit(random_resized_crop, static_argnames="size")
    images, mask = jitted(jnp.asarray(IMAGES), KEY, jnp.asarray(IMAGES[..., 0]), size=(10, 12))
    assert mask is not None
    assert (images.shape, mask.shape) == ((4, 10, 12, 3), (4, 10, 12))


def test_one_trace_serves_every_key():
    traces = []

    @jax.jit
    def step(images, key):
        traces.append(1)
        return random_resized_crop(images, key)[0]

    first, second = (np.asarray(step(jnp.asarray(IMAGES), jax.random.key(seed))) for seed in range(2))
    assert len(traces) == 1
    assert (first != second).any()
