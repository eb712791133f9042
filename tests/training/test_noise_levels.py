"""Schedules of noise are those of the papers, and predictions of an image and of its noise agree."""

import numpy as np
import pytest

from mpjax.training import image_of, loss_weights, noise_schedule, noisy, target_of


def test_linear_is_that_of_ddpm():
    schedule = noise_schedule("linear")
    kept = np.square(schedule.alphas)
    assert len(kept) == 1000
    assert kept[[0, 1, 999]] == pytest.approx([0.9999, 0.9999 * (1 - 1e-4 - 0.0199 / 999), 4.0358e-5], rel=1e-4)


def test_cosine_is_that_of_nichol_and_dhariwal():
    kept = np.square(noise_schedule("cosine").alphas)
    wanted = [np.cos((t / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2 for t in (1, 500, 900)]
    assert kept[[0, 499, 899]] == pytest.approx(np.array(wanted) / np.cos(0.008 / 1.008 * np.pi / 2) ** 2, rel=1e-9)
    assert kept[999] == pytest.approx(kept[998] * 0.001)  # the last variance is cut to 0.999


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_image_and_noise_have_a_variance_of_one_together_and_noise_grows(name):
    schedule = noise_schedule(name)
    assert schedule.alphas.dtype == np.float64
    np.testing.assert_allclose(schedule.alphas**2 + schedule.sigmas**2, 1, rtol=0, atol=1e-15)
    assert np.all(np.diff(schedule.sigmas) > 0)


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_the_image_follows_from_the_target(prediction, name):
    schedule = noise_schedule(name)
    image, noise = np.random.default_rng(0).uniform(-1, 1, (2, 1000))
    alpha, sigma = schedule.alphas, schedule.sigmas
    x = noisy(image, noise, alpha, sigma)
    target = target_of(prediction)(image, noise, alpha, sigma)
    np.testing.assert_allclose(image_of(prediction)(x, target, alpha, sigma), image, rtol=0, atol=1e-9)
    if prediction == "v":
        np.testing.assert_allclose(sigma * x + alpha * target, noise, rtol=0, atol=1e-12)  # eps from v
    else:
        assert target is noise


def test_min_snr_weighs_the_error_of_the_image_by_the_ratio_up_to_a_limit():
    schedule = noise_schedule("cosine")
    ratios = schedule.alphas**2 / schedule.sigmas**2
    of_eps, of_v = (loss_weights(schedule, prediction, 5.0) for prediction in ("eps", "v"))
    assert ratios[10] > 5 > ratios[500] > 0
    assert (of_eps[10], of_eps[500]) == pytest.approx((5 / ratios[10], 1))
    assert (of_v[10], of_v[500]) == pytest.approx((5 / (ratios[10] + 1), ratios[500] / (ratios[500] + 1)))
