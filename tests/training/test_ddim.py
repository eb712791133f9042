"""The sampler finds the image that a network knows, by steps that are those of DDIM and DDPM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision import get_policy
from mpjax.training import TIMES, ddim_steps, draw, drawing, noise_schedule, target_of


SHAPE = (2, 2, 1)
IMAGES = jnp.array([-1.0, -0.5, 0.25, 1.0, 0.0, 0.125, 0.5, -0.75]).reshape(2, *SHAPE)


def keys(*numbers):
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.key(0), number))(jnp.array(numbers))


def knows(images, schedule, prediction):
    """A network that knows the image that its input is the noisy form of."""
    alphas, sigmas = (jnp.asarray(table, jnp.float32) for table in (schedule.alphas, schedule.sigmas))

    def denoise(x, times):
        alpha, sigma = (table[times].reshape(-1, 1, 1, 1) for table in (alphas, sigmas))
        return target_of(prediction)(images, (x - alpha * images) / sigma, alpha, sigma)

    return denoise


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize("prediction", ["v", "eps"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_network_that_knows_the_images_gives_them(prediction, name, eta):
    schedule = noise_schedule(name)
    steps = ddim_steps(schedule, 7, eta)
    drawn = draw(knows(IMAGES, schedule, prediction), keys(0, 1), SHAPE, steps, prediction=prediction)
    np.testing.assert_allclose(drawn.image, IMAGES, rtol=0, atol=2e-6)
    assert drawn.finite.tolist() == [True, True]


def test_one_step_from_pure_noise_gives_the_image_too():
    schedule = noise_schedule("cosine")
    steps = ddim_steps(schedule, 1, 0.0)
    assert (steps.times.tolist(), steps.next_alphas.tolist(), steps.kept.tolist()) == ([999], [1.0], [0.0])
    drawn = draw(knows(IMAGES, schedule, "v"), keys(0, 1), SHAPE, steps, prediction="v")
    np.testing.assert_allclose(drawn.image, IMAGES, rtol=0, atol=1e-6)


def test_steps_are_as_far_apart_as_they_can_be_and_end_at_the_first_time():
    assert ddim_steps(noise_schedule("cosine"), 4, 0.0).times.tolist() == [999, 666, 333, 0]
    assert ddim_steps(noise_schedule("cosine"), TIMES, 0.0).times.tolist() == list(range(999, -1, -1))


def test_without_eta_no_noise_is_added_and_all_that_is_left_was_there():
    schedule = noise_schedule("linear")
    steps = ddim_steps(schedule, 5, 0.0)
    assert steps.fresh.tolist() == [0.0] * 5
    np.testing.assert_allclose(steps.kept[:-1], schedule.sigmas[steps.times[1:]], rtol=1e-6)


def test_with_eta_1_and_all_times_steps_are_those_of_ddpm():
    """Ho et al., equations 6 and 7: the posterior of the time before, given the image."""
    schedule = noise_schedule("linear")
    steps = ddim_steps(schedule, TIMES, 1.0)
    kept = np.square(schedule.alphas)
    betas = 1 - kept[1:] / kept[:-1]
    variance = (1 - kept[:-1]) / (1 - kept[1:]) * betas
    np.testing.assert_allclose(steps.fresh[:-1], np.sqrt(variance)[::-1], rtol=1e-4)
    # The mean's factor of the noisy image is kept / sigma, of which the image has its own share.
    of_noisy = np.sqrt(1 - betas) * (1 - kept[:-1]) / (1 - kept[1:])
    np.testing.assert_allclose((steps.kept / steps.sigmas)[:-1], of_noisy[::-1], rtol=1e-4)
    assert (steps.fresh[-1], steps.kept[-1], steps.next_alphas[-1]) == (0, 0, 1)


@pytest.mark.parametrize(("count", "eta"), [(0, 0.0), (1001, 0.0), (10, -0.5), (10, 1.5)])
def test_steps_that_there_are_not_are_refused(count, eta):
    with pytest.raises(UsageError, match="wanted (1 to 1000|0 .DDIM. to 1)"):
        ddim_steps(noise_schedule("cosine"), count, eta)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_an_image_does_not_depend_on_its_batch(eta):
    steps = ddim_steps(noise_schedule("cosine"), 3, eta)

    def draws(*numbers):
        return draw(lambda x, times: 0.3 * x, keys(*numbers), SHAPE, steps, prediction="v").image

    both = draws(0, 1)
    np.testing.assert_array_equal(draws(1), both[1:])
    assert float(jnp.max(jnp.abs(both[0] - both[1]))) > 0.1


def test_an_infinite_output_is_told_though_images_are_cut():
    def denoise(x, times):
        return jnp.where((times == 999)[:, None, None, None] & (x > 1e9), jnp.inf, x).at[1, 0, 0, 0].set(jnp.inf)

    steps = ddim_steps(noise_schedule("cosine"), 2, 0.0)
    drawn = draw(denoise, keys(0, 1), SHAPE, steps, prediction="v")
    assert drawn.finite.tolist() == [True, False]


class OfLabel(nnx.Module):
    """Predicts the number of the label for each pixel; half precision is what it is called in."""

    def __call__(self, x, times, labels):
        assert x.dtype == jnp.float16
        return jnp.broadcast_to(labels.astype(jnp.float16)[:, None, None, None] / 8, x.shape)


@pytest.mark.parametrize(("guidance", "output"), [(1.0, 1 / 8), (0.0, 3 / 8), (3.0, -3 / 8)])
def test_guidance_goes_from_the_output_without_a_label_to_that_with_it_and_beyond(guidance, output):
    """Of three classes, class 1 gives 1/8, and no class, 3, gives 3/8; 3/8 + 3 (1/8 - 3/8) is -3/8."""
    steps = ddim_steps(noise_schedule("cosine"), 1, 0.0)
    settings = {"prediction": "v", "num_classes": 3, "seed": 5}
    batch = {"number": jnp.array([0, 1]), "label": jnp.array([1, 1])}
    drawn = drawing(get_policy("mixed_float16"), SHAPE, steps, guidance=guidance, **settings)(OfLabel(), batch)
    assert drawn["image"].dtype == jnp.float32
    # All but noise: the image is -v.
    np.testing.assert_allclose(drawn["image"], jnp.full((2, *SHAPE), -output), rtol=0, atol=2e-4)
