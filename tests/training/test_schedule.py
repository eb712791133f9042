"""Schedules at their ends; the user's own are evaluated before training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config.durations import Duration
from mpjax.config.schema import Optimizer
from mpjax.training.schedule import learning_rate_schedule


def schedule(name, warmup, steps=100, **settings):
    config = Optimizer(schedule=name, learning_rate=0.4, warmup=Duration(0), **settings)
    return learning_rate_schedule(config, steps=steps, warmup=warmup)


def rate_of(name, warmup, step):
    with np.errstate(all="raise"):
        return float(schedule(name, warmup)(jnp.int32(step)))


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax divides by integer step counts; the train step allows that for its sake, as this does."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("name", "warmup", "step", "rate"),
    [
        ("cosine", 0, 0, 0.4),
        ("cosine", 0, 50, 0.2),
        ("cosine", 0, 100, 0.0),
        ("cosine", 20, 0, 0.0),
        ("cosine", 20, 5, 0.1),
        ("cosine", 20, 20, 0.4),
        ("cosine", 20, 60, 0.2),
        ("cosine", 20, 100, 0.0),
        ("linear", 20, 10, 0.2),
        ("linear", 20, 40, 0.3),
        ("linear", 20, 100, 0.0),
        ("constant", 0, 99, 0.4),
        ("constant", 20, 10, 0.2),
        ("constant", 20, 99, 0.4),
        ("one_cycle", 20, 0, 0.4 / 25),
        ("one_cycle", 20, 20, 0.4),
        ("one_cycle", 20, 100, 0.4 / 25e4),
    ],
)
def test_the_learning_rate_at(name, warmup, step, rate):
    assert rate_of(name, warmup, step) == pytest.approx(rate, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "one_cycle"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_training_has_a_finite_learning_rate(name, steps):
    rates = [float(schedule(name, 0, steps)(jnp.int32(step))) for step in range(steps)]
    assert all(np.isfinite(rates))
    assert max(rates) > 0


@pytest.mark.parametrize("warmup", [20, 100, 101])
def test_a_warmup_takes_at_most_a_fifth_of_training(warmup):
    assert rate_of("cosine", warmup, 20) == pytest.approx(0.4)
    assert rate_of("cosine", warmup, 19) == pytest.approx(0.38)
