"""Schedules at their ends; the user's own are evaluated before training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.config import Duration, Optimizer
from mpjax.errors import UsageError
from mpjax.training import learning_rate_schedule


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


OWN_FILE = """
import jax.numpy as jnp
import optax

def halved(peak, steps):
    return optax.exponential_decay(peak, steps, 0.5)

def whole(learning_rate, steps, warmup, power=1):
    return lambda count: learning_rate * (1 + count / steps) * warmup

def constant():
    return lambda count: 0.25

def negative(peak):
    return lambda count: peak - count * 0.1

def nan(peak):
    return lambda count: peak * jnp.log(count - 60.0)

def vector(peak):
    return lambda count: peak * jnp.ones(2)

def branches(peak):
    return lambda count: peak if count > 3 else 0.0

def number(peak):
    return peak

def more(peak, teacher):
    return lambda count: peak
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FILE)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def test_an_own_schedule_without_warmup_begins_after_the_linear_one(own):
    found = schedule(own("halved"), 20)
    assert [float(found(jnp.int32(step))) for step in (0, 10, 20, 100)] == pytest.approx([0, 0.2, 0.4, 0.2])


def test_an_own_schedule_with_warmup_is_all_of_training(own):
    """0.4 times the warm-up of 20 steps, and twice that after all of 100 steps."""
    found = schedule(own("whole"), 20)
    assert [float(found(jnp.int32(step))) for step in (0, 100)] == pytest.approx([8, 16])


def test_an_own_schedule_may_take_nothing(own):
    assert float(schedule(own("constant"), 0)(jnp.int32(7))) == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", r"own.py:negative is -4.59.* at step 50: wanted a learning rate of 0 or more"),
        ("nan", r"own.py:nan is nan at step 0"),
        ("vector", r"own.py:vector returned an array of shape \(2,\) for a step: wanted one number"),
        ("branches", r"own.py:branches cannot be compiled as a function of the step: .*jnp.where, not if"),
        ("number", r"own.py:number returned float: wanted a function from step to learning rate"),
        (
            "more",
            r"own.py:more wants teacher, which mpjax does not know: it fills in peak, learning_rate, steps, w",
        ),
        ("absent", r"has no absent"),
    ],
)
def test_an_own_schedule_that_gives_no_rate_is_an_error(own, name, message):
    with pytest.raises(UsageError, match=message):
        schedule(own(name), 0)
