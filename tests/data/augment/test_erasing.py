"""Random erasing: how many images, how much of them, and with what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.data.augment import random_erasing


erased = jax.jit(random_erasing)
KEY = jax.random.key(0)
PLAIN = jnp.full((3000, 24, 24, 2), 100.0)


@pytest.mark.slow
def test_the_share_of_erased_images_is_the_probability():
    changed = np.asarray(erased(PLAIN, KEY, 0.25) != 100).any((1, 2, 3))
    assert changed.mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("probability", "share"), [pytest.param(0.0, 0.0, marks=pytest.mark.slow), (1.0, 1.0)])
def test_none_and_all(probability, share):
    assert np.asarray(erased(PLAIN, KEY, probability) != 100).any((1, 2, 3)).mean() == share


def test_two_percent_to_a_third_of_an_image_is_erased():
    share = np.asarray(erased(PLAIN, KEY, 1.0) != 100)[..., 0].mean((1, 2))
    assert share.mean() == pytest.approx((0.02 + 1 / 3) / 2, abs=0.01)
    assert share.min() > 0.01
    assert share.max() < 0.36


def test_what_is_erased_is_a_rectangle_of_standard_normal_noise_in_all_channels():
    images = np.asarray(erased(PLAIN, KEY, 1.0))
    inside = images != 100
    np.testing.assert_array_equal(inside[..., 0], inside[..., 1])
    for part in inside[:50, :, :, 0]:
        assert part.sum() == part.any(0).sum() * part.any(1).sum()
    assert images[inside].mean() == pytest.approx(0, abs=0.01)
    assert images[inside].std() == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_stays(dtype):
    assert random_erasing(jnp.ones((4, 8, 8, 3), dtype), KEY).dtype == dtype


def test_one_trace_serves_every_key():
    traces = []

    @jax.jit
    def step(images, key):
        traces.append(1)
        return random_erasing(images, key, 1.0)

    first, second = (np.asarray(step(PLAIN[:16], jax.random.key(seed))) for seed in range(2))
    assert len(traces) == 1
    assert (first != second).any()
