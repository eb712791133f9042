"""Products in float8: their accuracy, their dtypes, and those of their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.errors import UsageError
from mpjax.precision.casting import equations
from mpjax.precision.float8 import FLOAT8, MXFP8, RECIPES, ROWWISE, Float8Dot, product


LAST_BY_FIRST = (((2,), (0,)), ((), ()))


def operands(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (2, 17, 64)), jax.random.normal(keys[1], (64, 4, 16))
    return x.astype(dtype), w.astype(dtype)


def decibels(exact, found):
    exact, found = np.asarray(exact, np.float64), np.asarray(found, np.float64)
    return 10 * np.log10(np.sum(exact**2) / np.sum((exact - found) ** 2))


def loss_of(dot):
    def loss(x, w):
        return jnp.sum(jnp.sin(dot(x, w, LAST_BY_FIRST).astype(jnp.float32) / 8))

    return loss


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_output_and_both_gradients_are_within_20_decibels(recipe):  # as torchao's tests have it
    x, w = operands()
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    found = jax.jit(lambda x, w: Float8Dot(recipe)(x, w, LAST_BY_FIRST))(x, w)
    assert decibels(jax.lax.dot_general(*wide, LAST_BY_FIRST), found) > 28
    exact = jax.grad(loss_of(jax.lax.dot_general), (0, 1))(*wide)
    found = jax.jit(jax.grad(loss_of(Float8Dot(recipe)), (0, 1)))(x, w)
    for one, other in zip(exact, found, strict=True):
        assert decibels(one, other) > 20


@pytest.mark.parametrize(("recipe", "gradient"), [(FLOAT8, "float8_e5m2"), (ROWWISE, "float8_e5m2")], ids=str)
def test_the_three_products_have_float8_operands(recipe, gradient):
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(Float8Dot(recipe)), (0, 1)))(*operands())
    dots = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    found = [{str(var.aval.dtype) for var in eqn.invars} for eqn in dots]
    assert found == [{"float8_e4m3fn"}, *[{"float8_e4m3fn", gradient}] * 2]
    assert [str(eqn.outvars[0].aval.dtype) for eqn in dots] == ["bfloat16"] * 3
    # Hopper's fast sums are for the forward pass alone.
    assert [eqn.params["precision"] is None for eqn in dots] == [True, False, False]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_results_and_gradients_have_the_dtypes_of_their_operands(recipe, dtype):
    x, w = operands(dtype)
    y, gradients = jax.eval_shape(
        lambda x, w: (Float8Dot(recipe)(x, w, LAST_BY_FIRST), jax.grad(loss_of(Float8Dot(recipe)), (0, 1))(x, w)), x, w
    )
    assert (y.shape, y.dtype) == ((2, 17, 4, 16), dtype)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, dtype), (w.shape, dtype)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize(("bad", "scale"), [(np.inf, 1e-4), (np.nan, 1e3)])
def test_a_value_that_is_not_finite_spoils_its_row_and_no_other(recipe, bad, scale):
    x, w = operands()
    multiply = jax.jit(lambda x: Float8Dot(recipe)(x, w, LAST_BY_FIRST))
    plain, back = jax.vjp(multiply, x * scale)
    y = np.asarray(multiply((x * scale).at[0, 3, 5].set(bad)), np.float32)
    assert not np.isfinite(y[0, 3]).any()
    expected = np.asarray(plain[0], np.float32)
    np.testing.assert_allclose(np.delete(y[0], 3, axis=0), np.delete(expected, 3, axis=0), rtol=0.01)
    g = jnp.full_like(plain, scale)
    dx, expected = (np.asarray(back(each)[0], np.float32)[0] for each in (g.at[0, 3].set(bad), g))
    assert not np.isfinite(dx[3]).any()
    np.testing.assert_array_equal(np.delete(dx, 3, axis=0), np.delete(expected, 3, axis=0))


FLOAT32 = np.dtype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1.0, 1e3, 1e15])
def test_a_gradient_of_a_gradient_is_near_whatever_the_scale(recipe, scale):
    x, w, c = jax.random.normal(jax.random.key(0), (3, 64, 64))

    def penalty(multiply, x, w):
        def loss(x, w):
            return scale * jnp.sum(c * jnp.sin(multiply(x, w) / 8))

        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

    exact = jax.grad(lambda *given: penalty(jnp.dot, *given), (0, 1))(x, w)
    found = jax.jit(jax.grad(lambda *given: penalty(lambda x, w: product(x, w, recipe, FLOAT32), *given), (0, 1)))(x, w)
    for one, other in zip(exact, found, strict=True):
        assert decibels(one, other) > 18  # of several roundings


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_third_derivative_is_near_too(recipe):
    x, w = jax.random.normal(jax.random.key(0), (2, 64, 64))

    def third(multiply):
        function = lambda t: jnp.sum(jnp.sin(multiply(t * x, w) / 8))  # noqa: E731
        return jax.grad(jax.grad(jax.grad(function)))(1.0)

    exact = float(third(jnp.dot))
    assert float(third(lambda x, w: product(x, w, recipe, FLOAT32))) == pytest.approx(exact, rel=0.1)


@functools.partial(jax.jit, static_argnums=3)
def product_and_gradients(x, w, g, recipe):
    y, back = jax.vjp(lambda x, w: product(x, w, recipe, FLOAT32), x, w)
    return y, *back(g)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize(
    ("one", "other"),
    [(1e37, 1e-30), (1e-25, 1e-10), (1e-37, 1.0), (1e-36, 1e36), (1e20, 1e15), (1e-16, 1e-19)],
)
def test_no_scale_overflows_or_underflows_where_the_result_does_not(recipe, one, other):
    x, w, g = np.random.default_rng(0).uniform(0.5, 1.0, (3, 64, 64)).astype(np.float32)
    exact = (x @ w, g @ w.T, x.T @ g)
    by_x, by_w = 1 / np.float64(one), 1 / np.float64(other)
    for i, given in enumerate([(x * one, w * other, g), (x, w * one, g * other), (x * other, w, g * one)]):
        assert decibels(exact[i], np.asarray(product_and_gradients(*given, recipe)[i], np.float64) * by_x * by_w) > 20


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_an_empty_batch_has_an_empty_result_and_zero_gradients(recipe, shape):
    w = jnp.ones((64, 32), jnp.bfloat16)
    numbers = (((len(shape) - 1,), (0,)), ((), ()))
    y, back = jax.vjp(lambda x, w: Float8Dot(recipe)(x, w, numbers), jnp.ones(shape, jnp.bfloat16), w)
    assert y.shape == (*shape[:-1], 32)
    dx, dw = back(y)
    assert dx.shape == shape
    np.testing.assert_array_equal(np.float32(dw), np.zeros((64, 32)))


def test_an_outlier_row_costs_other_rows_their_small_values_by_tensor_and_not_by_row():
    x = jnp.ones((2, 64), jnp.bfloat16).at[0].set(2.0**30)
    w = jnp.eye(64, dtype=jnp.bfloat16)
    numbers = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(np.asarray(Float8Dot(FLOAT8)(x, w, numbers), np.float32)[1], 0)
    np.testing.assert_array_equal(np.asarray(Float8Dot(ROWWISE)(x, w, numbers), np.float32)[1], 1)


def test_blocks_keep_what_is_small_beside_a_block_of_outliers():
    x = jnp.ones((1, 64), jnp.bfloat16).at[0, :32].set(2.0**30)
    y = Float8Dot(MXFP8)(x, jnp.eye(64, dtype=jnp.bfloat16), (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(np.asarray(y, np.float32)[0, 32:], 1)


def test_a_product_with_batch_axes_is_left_alone():
    x = jnp.ones((2, 64, 64), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: Float8Dot(FLOAT8)(x, x, (((2,), (1,)), ((0,), (0,)))))(x)
    assert [eqn.primitive.name for _, eqn in equations(jaxpr)] == ["dot_general"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_checkpointing_changes_no_gradient(recipe):
    x, w = operands()
    x = x.at[0, 0].set(448.0)  # e4m3fn has numbers of 256 and more, which `jax.lax.reduce_precision` makes inf

    def kept(primitive, *_, **params):
        return True

    plain = jax.jit(jax.grad(loss_of(Float8Dot(recipe)), (0, 1)))(x, w)
    again = jax.jit(jax.grad(jax.checkpoint(loss_of(Float8Dot(recipe)), policy=kept), (0, 1)))(x, w)
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_forward_mode_is_refused_with_what_to_write(recipe):
    x, w = (jnp.ones((32, 64)), jnp.ones((64, 32)))

    def loss(x):
        return jnp.sum(product(x, w, recipe, FLOAT32) ** 2)

    for differentiate in (lambda: jax.jvp(loss, (x,), (x,)), lambda: jax.hessian(loss)(x[:1])):
        with pytest.raises(UsageError, match=r"no derivatives in forward mode .* write jax.grad"):
            differentiate()
