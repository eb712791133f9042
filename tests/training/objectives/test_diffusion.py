"""Diffusion: noise and times of each example, in float32, by the step's key or by the example alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.config import Data
from mpjax.data import labelled_images
from mpjax.data.augment import preparation_of
from mpjax.precision import get_policy
from mpjax.training import RunObjective, diffusion, keys_of_images, noise_schedule, target_of, with_noise


IMAGES = jnp.asarray(np.random.default_rng(0).integers(0, 256, (6, 4, 4, 1), np.uint8))
LABELS = jnp.array([0, 1, 2, 0, 1, 2])
BATCH = {"image": IMAGES, "label": LABELS}
SCHEDULE = noise_schedule("cosine")


def preparing(prediction="v", drop_label=0.0, min_snr=0.0, num_classes=3):
    scaled = preparation_of(Data().for_task("diffusion"), labelled_images(3, (4, 4, 1)))
    settings = {"num_classes": num_classes, "drop_label": drop_label, "min_snr": min_snr}
    return with_noise(scaled, SCHEDULE, prediction=prediction, **settings)


@functools.cache
def prepared(training, **settings):
    key = jax.random.key(1) if training else None
    return preparing(**settings)(BATCH, key)


@pytest.mark.parametrize("prediction", ["v", "eps"])
def test_an_image_and_its_target_are_those_of_one_noise(prediction):
    batch = prepared(True, prediction=prediction)
    clean = (np.asarray(IMAGES, np.float64) / 255) * 2 - 1
    alpha, sigma = (table[batch["time"]].reshape(-1, 1, 1, 1) for table in (SCHEDULE.alphas, SCHEDULE.sigmas))
    noise = (batch["image"] - alpha * clean) / sigma
    wanted = target_of(prediction)(clean, noise, alpha, sigma)
    assert {batch[name].dtype.name for name in ("image", "noise_target")} == {"float32"}
    np.testing.assert_allclose(batch["noise_target"], wanted, rtol=0, atol=1e-4)
    assert 0.5 < float(np.std(noise)) < 1.5
    assert len(set(batch["time"].tolist())) == 6


def test_noise_and_times_follow_from_the_key():
    one, same, other = (preparing()(BATCH, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["image"], same["image"])
    assert not np.array_equal(one["time"], other["time"])


def test_labels_are_dropped_in_training_alone():
    many = {"image": jnp.zeros((2000, 4, 4, 1), jnp.uint8), "label": jnp.full(2000, 1)}
    dropped = preparing(drop_label=0.25)(many, jax.random.key(0))["label"]
    assert set(dropped.tolist()) == {1, 3}
    assert 0.21 < float(jnp.mean(dropped == 3)) < 0.29
    assert set(preparing(drop_label=0.25)(many, None)["label"].tolist()) == {1}
    assert set(preparing()(many, jax.random.key(0))["label"].tolist()) == {1}


def test_in_evaluation_an_example_has_its_own_noise_whatever_is_beside_it():
    whole = preparing()(BATCH, None)
    order = jnp.array([4, 2, 2])
    some = preparing()({name: value[order] for name, value in BATCH.items()}, None)
    for name in ("image", "time", "noise_target"):
        np.testing.assert_array_equal(some[name], whole[name][order])
    assert len(set(whole["time"].tolist())) == 6


def test_keys_tell_images_apart_by_one_bit_and_by_places():
    image = np.zeros((1, 4, 4, 1), np.uint8)
    others = []
    for place in range(4):
        for value in (1, 2, 255):
            other = image.copy()
            other[0, place, 0, 0] = value
            others.append(other)
    keys = [jax.random.key_data(keys_of_images(jnp.asarray(x)))[0].tolist() for x in [image, *others]]
    assert len(set(map(tuple, keys))) == 13
    floats = jax.random.key_data(keys_of_images(jnp.asarray([[[[0.5]]], [[[0.5000001]]]], jnp.float32)))
    assert floats[0].tolist() != floats[1].tolist()


def test_times_of_evaluation_are_spread_over_all():
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2000, 4, 4, 1), np.uint8))
    times = np.asarray(preparing()({"image": images, "label": jnp.zeros(2000, jnp.int32)}, None)["time"])
    counts, _ = np.histogram(times, 10, (0, 1000))
    assert counts.min() > 150
    assert counts.max() < 250


class Half(nnx.Module):
    """Predicts nothing but zeros, in float16."""

    def __call__(self, x, times, labels):
        assert (x.dtype, times.dtype, labels.dtype) == (jnp.float16, jnp.int32, jnp.int32)
        return jnp.zeros_like(x)


@pytest.mark.parametrize("min_snr", [0.0, 5.0])
def test_the_loss_is_the_mean_square_in_float32_weighted_in_training_alone(min_snr):
    objective = RunObjective(diffusion(get_policy("mixed_float16")), preparing(min_snr=min_snr))
    evaluated = objective.measure(Half(), BATCH)
    batch = prepared(False)
    wanted = np.mean(np.square(batch["noise_target"]), axis=(1, 2, 3))
    assert evaluated["loss"].dtype == jnp.float32
    np.testing.assert_allclose(evaluated["loss"], wanted, rtol=1e-6)
    batch = prepared(True, min_snr=min_snr)
    squares = np.mean(np.square(batch["noise_target"]), axis=(1, 2, 3))
    ratios = SCHEDULE.ratios[batch["time"]]
    weights = np.minimum(ratios, 5) / (ratios + 1) if min_snr else 1
    loss, metrics = objective.loss(Half(), BATCH, jax.random.key(1))
    assert (loss.value, metrics) == (pytest.approx(np.mean(squares * weights), rel=1e-5), {})
