"""Batch norm with a derivative of its own: Flax's numbers, two sums over the input in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import BatchNorm, batch_norm, relu_after
from mpjax.precision.casting import equations


X = 2 + 3 * jax.random.normal(jax.random.key(0), (4, 5, 6, 3))


@pytest.fixture(autouse=True)
def _ranks():
    """Flax adds vectors to images, and half precision to float32."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def norms(**options):
    """Flax's batch norm and mpjax's, with the same scales, biases and running statistics."""
    pair = [kind(3, momentum=0.9, rngs=nnx.Rngs(0), **options) for kind in (nnx.BatchNorm, BatchNorm)]
    for norm in pair:
        norm.scale[...] = jnp.array([0.5, 1.0, -2.0])
        norm.bias[...] = jnp.array([0.1, 0.0, -0.3])
        norm.mean[...] = jnp.array([2.5, 0.0, -1.0])
    return pair


def results(norm, call):
    """The output, the running statistics, and the gradients of a loss with unlike weights."""
    graph, params, stats = nnx.split(norm, nnx.Param, ...)

    def loss(params, x):
        model = nnx.merge(graph, params, stats, copy=True)
        y = call(model, x)
        weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return jnp.sum(jnp.square(y) * weights), (y, model.mean[...], model.var[...])

    gradients, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, X)
    return outputs, nnx.to_pure_dict(gradients[0]), gradients[1]


@pytest.mark.slow
@pytest.mark.parametrize("with_relu", [False, True])
def test_training_gives_the_numbers_of_flax(with_relu):
    flax, own = norms()

    def by_flax(norm, x):
        return nnx.relu(norm(x)) if with_relu else norm(x)

    expected, actual = results(flax, by_flax), results(own, lambda norm, x: norm(x, relu=with_relu))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("with_relu", [False, True])
def test_many_rows_are_added_up_in_two_stages_to_the_same_numbers(monkeypatch, with_relu):
    _, own = norms()
    once = results(own, lambda norm, x: norm(x, relu=with_relu))
    monkeypatch.setattr(batch_norm, "MANY", 8)
    twice = results(own, lambda norm, x: norm(x, relu=with_relu))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), twice, once)


@pytest.mark.parametrize(
    ("rows", "parts"), [(8191, 1), (8192, 64), (12_544, 64), (802_816, 512), (3_211_264, 1024), (8193, 1), (9_000, 8)]
)
def test_parts_are_a_power_of_two_that_divides_the_rows(rows, parts):
    assert batch_norm._parts(rows) == parts
    assert rows % parts == 0


def test_both_sums_of_many_rows_share_their_second_stage():
    _, norm = norms()
    x = jnp.ones((2, 64, 64, 3))

    def loss(x):
        return jnp.vdot(nnx.clone(norm)(x), x)

    program = jax.make_jaxpr(jax.grad(loss))(x).jaxpr
    second = [
        eqn
        for _, eqn in equations(program)
        if eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.shape == (64, 6)
    ]
    assert len(second) == 2  # one forward, one backward


def test_relu_has_one_derivative_for_small_and_for_large_arrays(monkeypatch):
    _, own = norms()
    small = results(own, relu_after)
    monkeypatch.setattr(batch_norm, "LARGE", 1)
    large = results(own, relu_after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), large, small)


@pytest.mark.slow
def test_the_second_derivative_is_that_of_flax():
    flax, own = norms()

    def penalty(norm):
        def loss(x):
            return jnp.sum(jnp.sin(nnx.clone(norm)(x)))

        return jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x))))(X)

    np.testing.assert_allclose(penalty(own), penalty(flax), rtol=1e-3, atol=1e-5)


def test_running_statistics_of_other_data_change_nothing_in_training():
    """As those of pretrained weights are at first."""
    _, norm = norms()
    _, other = norms()
    other.mean[...], other.var[...] = jnp.full(3, 1e6), jnp.full(3, jnp.nan)
    np.testing.assert_array_equal(other(X), norm(X))


def test_a_step_takes_two_sums_over_the_input_forward_and_two_backward():
    def sums(norm) -> int:
        graph, params, stats = nnx.split(norm, nnx.Param, ...)

        def loss(params, x, weights):
            return jnp.vdot(nnx.merge(graph, params, stats, copy=True)(x), weights)

        program = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(params, X, X).jaxpr
        return sum(
            eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.shape == X.shape for _, eqn in equations(program)
        )

    flax, own = norms()
    assert (sums(flax), sums(own)) == (5, 4)


def test_evaluation_and_what_else_flax_offers_are_flax_s_bit_for_bit():
    mask = jnp.arange(4).reshape(4, 1, 1, 1) < 2
    for options, call in (
        ({"use_running_average": True}, lambda norm, x: norm(x)),
        ({}, lambda norm, x: norm(x, use_running_average=True)),
        ({}, lambda norm, x: norm(x, mask=mask)),
        ({"dtype": jnp.bfloat16}, lambda norm, x: norm(x)),
        ({"use_fast_variance": False}, lambda norm, x: norm(x)),
    ):
        flax, own = norms(**options)
        np.testing.assert_array_equal(call(own, X), call(flax, X))
        np.testing.assert_array_equal(own.var[...], flax.var[...])


def test_devices_of_a_mapped_axis_share_statistics_and_gradients():
    _, own = norms(axis_name="devices")
    _, alone = norms()
    graph, params, stats = nnx.split(own, nnx.Param, ...)

    def loss(norm, x, weights):
        return jnp.vdot(norm(x, relu=True), weights)

    def share(x, weights):
        return jax.grad(lambda x: loss(nnx.merge(graph, params, stats, copy=True), x, weights))(x)

    weights = jnp.cos(X)
    mapped = jax.jit(jax.vmap(share, axis_name="devices"))(X.reshape(2, 2, 5, 6, 3), weights.reshape(2, 2, 5, 6, 3))
    expected = jax.jit(jax.grad(lambda x: loss(nnx.clone(alone), x, weights)))(X)
    np.testing.assert_allclose(mapped.reshape(X.shape), expected, rtol=1e-4, atol=1e-5)
