"""Inf that becomes zero: an overflow, whose gradients vanish as those of an underflow do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose, round_to
from mpjax.precision import BFLOAT16, FLOAT16


X = (lambda x: jnp.sign(x) * 300 + x * 700)(jax.random.normal(jax.random.key(0), (8, 16)))


class Scaled(nnx.Module):
    def __init__(self, function):
        self.function, self.dtype = function, jnp.float32
        self.weight = nnx.Param(jnp.ones(16))

    def __call__(self, x):
        return self.function(x.astype(self.dtype)) * self.weight[...].astype(self.dtype)[None]


class Net(nnx.Module):
    def __init__(self, function):
        self.own = Scaled(function)

    def __call__(self, x):
        return self.own(x)


def _mean_of(x):
    return jnp.mean(x, axis=-1, keepdims=True)


TO_ZERO = {
    "root of the mean square": lambda x: x * jax.lax.rsqrt(_mean_of(x * x) + 1e-6),
    "length": lambda x: x / jnp.sqrt(_mean_of(x * x) + 1e-6),
    "ratio": lambda x: x / (1 + x * x),
    "inverse of a square": lambda x: 1e3 / (1 + jnp.square(x)),
}


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(name, loss, marks=pytest.mark.slow if name == "root of the mean square" else [])
        for name, loss in zip(TO_ZERO, itertools.cycle(("square", "beside one")), strict=False)
    ],
)
def test_an_inf_that_becomes_zero_is_an_overflow_where_it_becomes_inf(name, loss):
    def loss_fn(model, x):
        y = model(x).astype(jnp.float32)
        return jnp.mean(jnp.square(y)) + (1e4 if loss == "beside one" else 0)

    found = diagnose(Net(TO_ZERO[name]), loss_fn, X, policy="mixed_float16", loss_scale=256.0)
    assert all(map(np.isfinite, found.loss))
    assert (found.verdict, found.path, found.direction) == ("overflow", "own", "forward")
    assert found.operation in ("mul", "square")
    assert "overflow in float16 (magnitudes up to 2^" in found.evidence
    assert (found.rules, found.verified) == ({"own": "float32"}, True)


def test_an_inf_that_does_no_harm_beside_an_underflow_is_an_underflow():
    def loss_fn(model, x):
        y = model(x).astype(jnp.float32)
        return jnp.mean(y * 1e-9) + 1

    masked = Net(lambda x: jnp.where(x > 0, x, jnp.minimum(x * x, 3.0)))
    found = diagnose(masked, loss_fn, X, policy="mixed_float16")
    assert (found.verdict, found.direction) == ("underflow", "backward")
    assert found.better_scale is not None


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_one_end_of_the_range_alone(dtype):
    values = jnp.float32([1e-9, -1e-5, 0.1, 3.0, 2049.0, 1e5, -1e30])
    small = np.abs(np.asarray(values)) < 2.0**-14
    both, none = round_to(values, dtype), round_to(values, dtype, top=False, bottom=False)
    no_top, no_bottom = round_to(values, dtype, top=False), round_to(values, dtype, bottom=False)
    np.testing.assert_array_equal(no_top, np.where(small, both, none))
    np.testing.assert_array_equal(no_bottom, np.where(small, none, both))
    if dtype == FLOAT16:
        assert np.isinf(no_bottom[-2:]).all()
        assert np.isfinite(no_top).all()
        assert (no_top[0], no_bottom[0]) == (0.0, none[0])
