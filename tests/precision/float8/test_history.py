"""Delayed scaling: what a layer remembers, and what a run makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.precision.float8.history import HISTORY, is_history, with_gradient


POLICY = mpjax.Policy("float32", "bfloat16", "float32", products="float8_delayed")


def layer():
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.eye(64)
    mpjax.apply_policy(model, POLICY)
    return model


def test_a_call_in_training_remembers_the_largest_values_and_one_in_evaluation_does_not():
    model = layer()
    model(jnp.full((2, 64), 3.0))
    model(jnp.full((2, 64), 5.0))
    history = getattr(model, HISTORY)[...]
    assert history.shape == (3, 16)
    np.testing.assert_array_equal(history[:, :3], [[5.0, 3.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    model.eval()
    model(jnp.full((2, 64), 7.0))
    np.testing.assert_array_equal(getattr(model, HISTORY)[...], history)


def test_the_first_step_goes_by_the_present_and_later_ones_by_the_past():
    model = layer()
    np.testing.assert_array_equal(model(jnp.full((1, 64), 100.0))[0], 96.0)  # the nearest in e4m3
    # Scaled for 100, by 4: 448 / 4 is the largest, and 1,000 saturates.
    np.testing.assert_array_equal(model(jnp.full((1, 64), 1000.0))[0], 112.0)
    np.testing.assert_array_equal(model(jnp.full((1, 64), 1000.0))[0], 1024.0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_saturation_does_not_hide_what_is_not_finite(bad):
    model = layer()
    model(jnp.ones((1, 64)))
    assert not np.isfinite(model(jnp.full((1, 64), bad))).any()


def test_the_derivative_by_a_history_is_the_largest_incoming_gradient():
    model = layer()
    graph, kernel, history = nnx.split(model, nnx.Param, ...)

    def loss(history):
        return jnp.sum(nnx.merge(graph, kernel, history)(jnp.ones((2, 64))) * jnp.array([[2.0], [-6.0]]))

    cotangent = jax.grad(loss)(history)[HISTORY].get_value()
    assert float(jnp.sum(jnp.abs(cotangent))) == 6.0
    after = with_gradient(jnp.zeros((3, 16)), cotangent)
    assert after[2, 0] == 6.0


def test_another_policy_drops_the_history():
    model = layer()
    mpjax.apply_policy(model, "mixed_bfloat16")
    assert not any(is_history("/".join(map(str, path))) for path, _ in nnx.to_flat_state(nnx.state(model)))
    np.testing.assert_array_equal(model(jnp.full((1, 64), 100.0))[0], 100.0)


def test_autocast_says_that_it_has_no_layers_to_remember_in():
    with pytest.raises(UsageError, match="autocast has no layers to keep the history of float8_delayed in"):
        mpjax.autocast(jnp.dot, POLICY)
