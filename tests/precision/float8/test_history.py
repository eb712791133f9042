"""Delayed scaling: what a layer remembers, and what a run makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import UsageError
from mpjax.precision.float8 import HISTORY, end_step, is_history, with_gradient


POLICY = mpjax.Policy("float32", "bfloat16", "float32", products="float8_delayed")


def layer():
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.eye(64)
    mpjax.apply_policy(model, POLICY)
    return model


called = nnx.jit(lambda model, x: model(x))
one_step_on = jax.jit(end_step)


def history_of(model):
    return getattr(model, HISTORY)[...]


def ended(model):
    """Ends a step in which there was no backward pass."""
    variable = getattr(model, HISTORY)
    variable.set_value(one_step_on(variable[...]))


@pytest.mark.slow
def test_calls_of_a_step_in_training_remember_the_largest_values_and_those_in_evaluation_do_not():
    model = layer()
    called(model, np.full((2, 64), 3.0))
    ended(model)
    called(model, np.full((2, 64), 5.0))
    called(model, np.full((2, 64), 4.0))
    history = history_of(model)
    assert history.shape == (3, 17)
    np.testing.assert_array_equal(history[:, :3], [[5.0, 3.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    model.eval()
    called(model, np.full((2, 64), 7.0))
    np.testing.assert_array_equal(history_of(model), history)


def test_a_second_policy_leaves_a_layer_in_evaluation_mode():
    model = layer()
    model.eval()
    mpjax.apply_policy(model, POLICY)
    called(model, np.full((2, 64), 7.0))
    np.testing.assert_array_equal(history_of(model), np.zeros((3, 17)))


def test_the_first_step_goes_by_the_present_and_later_ones_by_the_past():
    model = layer()
    np.testing.assert_array_equal(called(model, np.full((1, 64), 100.0))[0], 96.0)  # the nearest in e4m3
    ended(model)
    # Scaled for 100, by 4: 448 / 4 is the largest, and 1,000 saturates.
    np.testing.assert_array_equal(called(model, np.full((1, 64), 1000.0))[0], 112.0)
    np.testing.assert_array_equal(called(model, np.full((1, 64), 1000.0))[0], 112.0)
    ended(model)
    np.testing.assert_array_equal(called(model, np.full((1, 64), 1000.0))[0], 1024.0)


def test_a_loop_that_never_ends_a_step_goes_by_the_present():
    model = layer()
    for value in (1.0, 1024.0, 1.0):
        np.testing.assert_array_equal(called(model, np.full((1, 64), value))[0], value)


def test_the_last_sixteen_steps_are_looked_at():
    model = layer()
    called(model, np.full((1, 64), 448.0))
    ended(model)
    for _ in range(16):
        np.testing.assert_array_equal(called(model, np.full((1, 64), 1.03125))[0], 1.0)
        ended(model)
    # Now scaled for 1.03125: the smallest number of e4m3 is 2^-9 / 256.
    np.testing.assert_array_equal(called(model, np.full((1, 64), 2.0**-17))[0], 2.0**-17)


def test_values_that_are_not_finite_are_not_remembered():
    model = layer()
    called(model, jnp.full((1, 64), 3.0).at[0, 0].set(jnp.inf).at[0, 1].set(jnp.nan))
    assert float(history_of(model)[0, 0]) == 3.0


def test_an_empty_batch_changes_no_history():
    model = layer()
    called(model, np.full((1, 64), 3.0))
    before = history_of(model)
    assert model(jnp.ones((0, 64))).shape == (0, 64)
    np.testing.assert_array_equal(history_of(model), before)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_saturation_does_not_hide_what_is_not_finite(bad):
    model = layer()
    model(jnp.ones((1, 64)))
    ended(model)
    assert not np.isfinite(called(model, np.full((1, 64), bad))).any()


def test_the_derivative_by_a_history_is_the_largest_incoming_gradient():
    model = layer()
    graph, kernel, history = nnx.split(model, nnx.Param, ...)

    def loss(history):
        return jnp.sum(nnx.merge(graph, kernel, history)(jnp.ones((2, 64))) * jnp.array([[2.0], [-6.0]]))

    cotangent = jax.jit(jax.grad(loss))(history)[HISTORY].get_value()
    assert float(jnp.sum(jnp.abs(cotangent))) == 6.0
    after = with_gradient(jnp.zeros((3, 17)), cotangent)
    np.testing.assert_array_equal(after[2, :3], [0.0, 6.0, 0.0])


def as_layer(merged: Any) -> nnx.Linear:
    return merged


def step_of(loss) -> Any:
    """Returns a function that takes a step's derivative by the kernel, and ends the step of the history."""
    model = layer()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(rest, *given):
        def of(params, rest):
            model = as_layer(nnx.merge(graph, params, rest))
            return loss(model, *given), nnx.split(model, nnx.Param, ...)[2]

        (_, after), (gradient, cotangent) = jax.value_and_grad(of, (0, 1), has_aux=True)(params, rest)
        history = with_gradient(after[HISTORY].get_value(), cotangent[HISTORY].get_value())
        rest[HISTORY].set_value(history)
        return gradient["kernel"].get_value(), rest

    return step, rest


@pytest.mark.slow
def test_a_layer_called_several_times_in_a_step_has_the_gradient_of_all_calls_and_one_history():
    x, c = jax.random.normal(jax.random.key(0), (2, 32, 64))

    def loss(model, large):
        x_of_last = jnp.tanh(model(model(x))) * 0.01
        return jnp.sum(c * model(x_of_last)) * large

    def exact(kernel):
        return jnp.sum(c * ((jnp.tanh(x @ kernel @ kernel) * 0.01) @ kernel))

    expected = jax.grad(exact)(jnp.eye(64))
    step, rest = step_of(loss)
    for number, large in enumerate([1.0, 100.0, 100.0, 100.0]):
        gradient, rest = step(rest, large)
        error = float(jnp.linalg.norm(gradient / large - expected) / jnp.linalg.norm(expected))
        assert error < 0.1 or number == 1  # when gradients became 100 times as large
    history = rest[HISTORY].get_value()
    assert (history[:, 1:5] > 0).all()
    assert (history[:, [0, *range(5, 17)]] == 0).all()
    assert float(history[0, 1]) == pytest.approx(float(jnp.max(jnp.abs(x))), rel=0.1)
    # Of the last call, whose incoming gradient is the largest.
    assert float(history[2, 1]) == pytest.approx(100 * float(jnp.max(jnp.abs(c))), rel=0.01)


def test_a_gradient_within_a_loss_is_remembered_and_right_however_small_the_loss():
    x, c = jax.random.normal(jax.random.key(0), (2, 32, 64))

    def penalty(multiply):
        return 1e-4 * jnp.sum(jax.grad(lambda x: jnp.sum(c * jnp.sin(multiply(x))))(x) ** 2)

    def loss(model):
        graph, state = nnx.split(model)

        def multiply(x):  # Flax would refuse to change a layer from within another derivative
            inner = as_layer(nnx.merge(graph, state))
            inner.eval()
            return inner(x)

        value = penalty(multiply)
        model(x)
        return value

    expected = jax.jit(jax.grad(lambda kernel: penalty(lambda x: x @ kernel)))(jnp.eye(64))
    step, rest = step_of(loss)
    for _ in range(3):
        gradient, rest = step(rest)
        assert float(jnp.linalg.norm(gradient - expected) / jnp.linalg.norm(expected)) < 0.2
    assert float(rest[HISTORY].get_value()[2, 1]) >= 0.9 * float(jnp.max(jnp.abs(c * jnp.cos(x))))


@pytest.mark.parametrize("products", [None, "float8", "float8_rowwise", "float8_delayed", "mxfp8"])
def test_the_result_of_a_layer_is_sharded_as_asked(products):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    mpjax.apply_policy(model, mpjax.Policy("float32", "bfloat16", products=products))
    rows, columns = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (("a", None), (None, "a")))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4, 64), jnp.float32, sharding=rows)
        y = nnx.eval_shape(lambda model, x: model(x, out_sharding=columns), model, x)
    assert y.sharding.spec == columns.spec


def test_another_policy_drops_the_history():
    model = layer()
    mpjax.apply_policy(model, "mixed_bfloat16")
    assert not any(is_history("/".join(map(str, path))) for path, _ in nnx.to_flat_state(nnx.state(model)))
    np.testing.assert_array_equal(called(model, np.full((1, 64), 100.0))[0], 100.0)


def test_autocast_says_that_it_has_no_layers_to_remember_in():
    with pytest.raises(UsageError, match="autocast has no layers to keep the history of float8_delayed in"):
        mpjax.autocast(jnp.dot, POLICY)
