"""Mixup and CutMix: shares by their distributions, targets in the shares of the images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data.augment import cutmix, cutmix_masks, mixup, mixup_or_cutmix
from mpjax.errors import UsageError


KEY = jax.random.key(0)
MIXES = {
    "mixup": lambda images, targets, key: mixup(images, targets, key, 0.4),
    "cutmix": lambda images, targets, key: cutmix(images, targets, key, 1.0),
    "either": lambda images, targets, key: mixup_or_cutmix(images, targets, key, 0.8, 1.0),
}


def batch(size, side=16):
    """Image i is filled with i and has a class of its own."""
    values = jnp.arange(size, dtype=jnp.float32)
    return jnp.broadcast_to(values[:, None, None, None], (size, side, side, 3)), jnp.eye(size, dtype=jnp.float32)


def halves(size, side=16):
    """The first half of the batch is filled with 0, of class 0, the other with 1, of class 1."""
    labels = jnp.arange(size) >= size // 2
    images = jnp.broadcast_to(labels[:, None, None, None], (size, side, side, 1)).astype(jnp.float32)
    return images, jax.nn.one_hot(labels.astype(jnp.int32), 2, dtype=jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_the_targets_shares_are_the_images(mix):
    """An image of its own number is worth the mean of its target's numbers, however it was mixed."""
    images, targets = jax.jit(mix)(*batch(32), KEY)
    assert (images.dtype, targets.dtype) == (jnp.float32, jnp.float32)
    assert images.shape == (32, 16, 16, 3)
    worth = np.asarray(targets) @ np.arange(32)
    np.testing.assert_allclose(np.asarray(images).mean((1, 2, 3)), worth, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(targets).sum(1), np.ones(32), rtol=1e-6)
    assert len(np.unique(np.round(worth, 3))) > 25


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "variance"), [(0.2, 0.178571), (1.0, 0.083333), (4.0, 0.027778)])
def test_mixups_share_is_beta_distributed(alpha, variance):
    """Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1))."""
    _, targets = jax.jit(mixup, static_argnums=3)(*halves(20_000, side=1), KEY, alpha)
    share = np.asarray(targets[:10_000, 0])
    np.testing.assert_allclose(share.mean(), 0.5, atol=0.015)
    np.testing.assert_allclose(share.var(), variance, rtol=0.04)


def test_cutmix_conserves_pixels_and_its_targets_are_exactly_their_shares():
    images, targets = jax.jit(cutmix, static_argnums=3)(*halves(256), KEY, 1.0)
    ones = np.asarray(images)[..., 0].sum((1, 2)).astype(np.int64)
    assert set(np.unique(images)) == {0.0, 1.0}
    np.testing.assert_array_equal(np.asarray(targets)[:, 1], (ones / 256).astype(np.float32))


@pytest.mark.slow
def test_cutmix_pastes_one_rectangle_from_the_same_place_of_the_partner():
    plain = jax.random.normal(KEY, (8, 16, 16, 2))
    images, targets = jax.jit(cutmix, static_argnums=3)(plain, jnp.eye(8), KEY, 1.0)
    pasted = np.asarray(images != plain).any(-1)
    np.testing.assert_array_equal(np.asarray(images)[pasted], np.asarray(plain[::-1])[pasted])
    for inside, share in zip(pasted, np.diag(targets), strict=True):
        rows, columns = inside.any(1), inside.any(0)
        assert inside.sum() == rows.sum() * columns.sum()
        assert (np.diff(np.flatnonzero(rows)) == 1).all()
        assert (np.diff(np.flatnonzero(columns)) == 1).all()
        assert share == np.float32(1 - inside.sum() / 256)


def test_the_border_cuts_what_is_pasted_to_0_32_on_average():
    """Of a side s around a uniform centre s - s^2/4 is inside; with s^2 uniform its square has mean 0.3208."""
    _, targets = jax.jit(cutmix, static_argnums=3)(*halves(8000), KEY, 1.0)
    # Sides are rounded down to sixteenths, by half of one on average.
    assert 0.29 < float(targets[:4000, 1].mean()) < 0.325


@pytest.mark.slow
def test_masks_get_the_rectangles_of_their_images():
    images = jnp.broadcast_to(jnp.arange(8, dtype=jnp.float32)[:, None, None, None], (8, 16, 16, 1))
    cut, masks = jax.jit(cutmix_masks, static_argnums=3)(images, images[..., 0].astype(jnp.int32), KEY, 1.0)
    assert masks.dtype == jnp.int32
    np.testing.assert_array_equal(cut[..., 0], masks)
    assert (np.asarray(masks) != np.asarray(images[..., 0])).any()


@pytest.mark.slow
def test_either_is_cutmix_for_its_share_of_the_images():
    jitted = jax.jit(lambda *batch: mixup_or_cutmix(*batch, 4.0, 1.0, cutmix_share=0.25))
    images, _ = jitted(*halves(4000, side=8), KEY)
    averaged = ((np.asarray(images) > 0) & (np.asarray(images) < 1)).any((1, 2, 3))
    assert averaged.mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_one_trace_serves_every_key(mix):
    traces = []

    @jax.jit
    def step(images, targets, key):
        traces.append(1)
        return mix(images, targets, key)

    first, second = (np.asarray(step(*batch(8), jax.random.key(seed))[1]) for seed in range(2))
    assert len(traces) == 1
    assert (first != second).any()


@pytest.mark.parametrize("alpha", [0, -1.0])
def test_a_share_that_has_no_distribution_is_refused(alpha):
    with pytest.raises(UsageError, match="alpha: got .*; wanted a number above 0"):
        mixup(*batch(4), KEY, alpha)


def test_labels_instead_of_targets_are_refused():
    with pytest.raises(UsageError, match=r"targets: got int32 \(4,\) for 4 images; wanted floating \[4, num_classes\]"):
        cutmix(batch(4)[0], jnp.arange(4, dtype=jnp.int32), KEY, 1.0)
