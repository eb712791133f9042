"""The scaled loss: formed in float32, reported unscaled, and differentiated scaled."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision import (
    dynamic_loss_scaling,
    no_loss_scaling,
    scale_loss,
    scaled_value_and_grad,
    static_loss_scaling,
)


GOOD = {"w": jnp.array([1.0, -2.0], jnp.float32)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_scaled_loss_is_formed_in_float32(dtype):
    state = dynamic_loss_scaling(optax.sgd(1.0)).init(GOOD)
    scaled = scale_loss(jnp.array(4.0, dtype), {"nested": (state,)})
    assert scaled.dtype == jnp.float32
    assert scaled == 131072.0


def test_a_float16_loss_is_warned_about_once_its_scale_can_overflow():
    state = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=2.0**16).init(GOOD)
    with pytest.warns(PrecisionWarning, match="loss is float16.*Compute the loss in float32"):
        scale_loss(jnp.array(1.0, jnp.float16), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scale_loss(jnp.array(1.0, jnp.bfloat16), state)
        scale_loss(jnp.array(1.0, jnp.float16), state._replace(scale=jnp.float32(2.0**15)))


def test_the_first_step_with_a_float16_loss_is_kept_and_the_run_compiles_once():
    tx = dynamic_loss_scaling(optax.sgd(0.5), initial_scale=2.0**15)
    traces = []

    def loss(params, x):
        return jnp.mean((params["w"].astype(jnp.float16) * x) ** 2)

    @jax.jit
    def step(params, state, x):
        traces.append(x.shape)
        value, grads = scaled_value_and_grad(loss)(state, params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"w": jnp.array([1.0, 2.0], jnp.float32)}
    state, finite, losses = tx.init(params), [], []
    for x in (0.25, 60000.0, 0.25, 0.25):  # tracing warns: the scale may grow past what a float16 loss can take
        params, state, value = step(params, state, jnp.full(2, x, jnp.float16))
        assert value.dtype == jnp.float32
        finite.append(bool(state.finite))
        losses.append(float(value))
    assert finite == [True, False, True, True]
    assert losses[0] == (0.0625 + 0.25) / 2
    assert losses[2] < losses[0]
    assert len(traces) == 1


def test_the_value_and_gradient_with_and_without_auxiliary_output():
    state = static_loss_scaling(optax.sgd(1.0), 8.0).init(GOOD)

    def loss(params, x, *, power):
        return jnp.sum(params["w"] ** power) * x, {"x": x}

    (value, aux), grads = scaled_value_and_grad(loss, has_aux=True)(state, GOOD, jnp.float32(3.0), power=2)
    assert (value, value.dtype, aux) == (15.0, jnp.float32, {"x": 3.0})
    assert grads["w"].tolist() == [48.0, -96.0]  # still scaled
    value, grads = scaled_value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(state, GOOD)
    assert value == 5.0
    assert grads["w"].tolist() == [16.0, -32.0]


def test_a_gradient_penalty_trains_the_same_parameters_with_scaling_on_and_off():
    x = jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32).reshape(4, 3)

    def critic(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])

    def loss(params):
        slopes = jax.grad(critic, argnums=1)(params, x)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=-1)) - 1.0) ** 2)
        return critic(params, x) / 4.0 + 10.0 * penalty, penalty

    def train(scale):
        tx = static_loss_scaling(optax.sgd(0.01, momentum=0.9), scale)  # unlike Adam, it takes a factor as it is

        @jax.jit
        def step(params, state):
            (_, penalty), grads = scaled_value_and_grad(loss, has_aux=True)(state, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, penalty

        params = {"w": jnp.sin(jnp.arange(6.0)).reshape(3, 2), "v": jnp.array([0.5, -1.5], jnp.float32)}
        state, penalties = tx.init(params), []
        for _ in range(10):
            params, state, penalty = step(params, state)
            penalties.append(float(penalty))
        assert state.skipped == 0
        return params, penalties

    on, of_on = train(2.0**10)
    off, of_off = train(1.0)
    for name, value in off.items():
        np.testing.assert_allclose(on[name], value, rtol=1e-6)
    assert of_on == pytest.approx(of_off, rel=1e-6)
    assert of_off[-1] < of_off[0]  # the penalty itself is trained, through its second derivative


def test_an_integer_loss_is_an_error_and_not_a_zero_gradient():
    state = no_loss_scaling(optax.sgd(1.0)).init(GOOD)
    with pytest.raises(UsageError, match="the loss is int32, which has no gradient"):
        scaled_value_and_grad(lambda p: jnp.argmax(p["w"]))(state, GOOD)


def test_a_summed_loss_of_81920_survives_the_default_scale():
    state = dynamic_loss_scaling(optax.sgd(1.0)).init(GOOD)
    params = {"w": jnp.ones(4096, jnp.float32)}
    value, grads = scaled_value_and_grad(lambda p: jnp.sum(p["w"] * 20.0))(state, params)
    assert value == 81920.0
    assert np.all(grads["w"] == 20.0 * 2.0**15)


def test_a_mean_over_33_million_values_has_a_gradient_in_float16():
    """2^-25 underflows to zero in float16; times the default scale of 2^15 it is 2^-10."""
    x = jnp.ones((2**25,), jnp.float16)
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    state = tx.init(x[:1])

    def mean(x):
        return jnp.mean(x.astype(jnp.float32))

    loss, gradient = scaled_value_and_grad(mean)(state, x)
    assert (float(loss), gradient.dtype) == (1.0, jnp.float16)
    assert jnp.all(gradient == jnp.float16(2**-10))
    assert not jnp.any(jax.grad(mean)(x))
