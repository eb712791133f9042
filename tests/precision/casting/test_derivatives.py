"""Derivative rules of the user's own stay in force under autocast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.errors import UsageError


F32 = jnp.float32
HALF = pytest.mark.parametrize("half", ["float16", "bfloat16"])
X = jnp.linspace(-1.0, 1.0, 24, dtype=F32).reshape(4, 6)
W = jnp.linspace(-0.5, 0.5, 36, dtype=F32).reshape(6, 6)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@jax.custom_jvp
def tripled(x, w):
    return x @ w


@tripled.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 3.0 * (dx @ w) + x @ dw


@jax.custom_vjp
def reversed_gradient(x, w):
    return jnp.exp(x @ w)


def _forward(x, w):
    y = jnp.exp(x @ w)
    return y, (x, w, y)


def _backward(residuals, g):
    x, w, y = residuals
    return -(g * y) @ w.T, jnp.einsum("...bi,...bo->io", x, g * y)


reversed_gradient.defvjp(_forward, _backward)


@HALF
def test_a_custom_jvp_rule_runs_with_casts(half):
    cast = mpjax.autocast(tripled, half)
    x, w = X.astype(half), W.astype(half)
    assert_same(cast(X, W), x @ w)
    value, slope = jax.jvp(cast, (X, W), (X, W))
    assert_same(value, x @ w)
    assert_same(slope, 3.0 * (x @ w) + x @ w)
    grad = jax.grad(lambda x: cast(x, W).astype(F32).sum())(X)
    np.testing.assert_allclose(grad, jnp.broadcast_to(3.0 * W.sum(1), (4, 6)), rtol=0.03, atol=0.03)
    assert grad.dtype == F32


@HALF
def test_a_custom_vjp_rule_runs_with_casts_on_its_residuals(half):
    cast = mpjax.autocast(reversed_gradient, half)
    x, w = X.astype(half), W.astype(half)
    y = jnp.exp((x @ w).astype(F32))
    assert_same(cast(X, W), y)
    dx, dw = jax.grad(lambda x, w: cast(x, w).sum(), argnums=(0, 1))(X, W)
    g = y.astype(half)
    assert_same(dx, (-g @ w.T).astype(F32))
    assert_same(dw, (x.T @ g).astype(F32))


@pytest.mark.parametrize("fn", [tripled, reversed_gradient])
@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.vmap(f, (0, None)),
        lambda f: lambda x, w: jax.lax.scan(lambda c, x: (c, f(x, w)), 0, x)[1],
    ],
    ids=["jit", "checkpoint", "vmap", "scan"],
)
def test_rules_stay_in_force_inside_other_constructs(fn, wrap):
    batch = jnp.stack([X, 0.5 * X])

    def loss(w, cast):
        return cast(wrap(fn))(batch, w).astype(F32).sum()

    def of_x(x, cast):
        return cast(wrap(fn))(x, W).astype(F32).sum()

    def cast(f):
        return mpjax.autocast(f, "bfloat16")

    for total, at in ((loss, W), (of_x, batch)):
        actual = jax.jit(jax.grad(lambda a, t=total: t(a, cast)))(at)
        expected = jax.jit(jax.grad(lambda a, t=total: t(a, lambda f: f)))(at)
        np.testing.assert_allclose(actual, expected, rtol=0.05, atol=0.1)
    inside = jax.jit(mpjax.autocast(jax.grad(lambda x: wrap(fn)(x, W).sum()), "bfloat16"))(batch)
    np.testing.assert_allclose(inside.astype(F32), expected, rtol=0.05, atol=0.1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def powered(name, x, index, key):
    return jnp.take(getattr(jnp, name)(x @ W), index, axis=0), index + 1


def _powered_forward(name, x, index, key):
    return powered(name, x, index, key), (x, index)


def _powered_backward(name, residuals, cotangents):
    _x, index = residuals
    g = jnp.zeros((4, 6), cotangents[0].dtype).at[index].add(cotangents[0])
    return 2.0 * (g @ W.T), None, None


powered.defvjp(_powered_forward, _powered_backward)


def test_a_custom_vjp_with_static_integer_and_key_arguments_and_an_integer_result():
    index = jnp.array([2, 0])

    def loss(x):
        values, following = mpjax.autocast(lambda x, i, k: powered("tanh", x, i, k), "float16")(
            x, index, jax.random.key(0)
        )
        assert following.dtype == jnp.int32
        return values.astype(F32).sum()

    rows = 2.0 * W.sum(1)
    expected = jnp.stack([rows, jnp.zeros(6), rows, jnp.zeros(6)])
    np.testing.assert_allclose(jax.grad(loss)(X), expected, rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X), expected, rtol=1e-2, atol=2e-3)


@jax.custom_jvp
def scaled_by(x, z, index):
    return x * z.real, index


@scaled_by.defjvp
def _(primals, tangents):
    x, z, index = primals
    return scaled_by(x, z, index), (5.0 * x * tangents[1].real, tangents[2])


@jax.custom_vjp
def scaled_by_too(x, z):
    return x * z.real


scaled_by_too.defvjp(
    lambda x, z: (x * z.real, (x, z)), lambda kept, g: (g, (5.0 * kept[0] * g).sum().astype(jnp.complex64))
)


@pytest.mark.parametrize("fn", [lambda x, z: scaled_by(x, z, jnp.array([1]))[0], scaled_by_too], ids=["jvp", "vjp"])
def test_a_rule_for_a_complex_argument_is_followed(fn):
    cast = mpjax.autocast(fn, "float16")
    grad = jax.grad(lambda z: cast(jnp.ones(3), z).sum())(jnp.complex64(2.0))
    assert grad == 15.0


def test_second_derivatives_through_rules():
    def penalty(w, cast):
        return jnp.square(jax.grad(lambda x: cast(jax.nn.softplus)(cast(tripled)(x, w)).astype(F32).sum())(X)).sum()

    actual = jax.grad(penalty)(W, lambda f: mpjax.autocast(f, "bfloat16"))
    np.testing.assert_allclose(actual, jax.grad(penalty)(W, lambda f: f), rtol=0.05, atol=0.3)
    assert actual.dtype == F32


def test_a_rule_is_not_differentiated_with_respect_to_what_it_closed_over():
    def loss(w, x):
        closed = jax.custom_jvp(lambda x: x @ w)
        closed.defjvp(lambda primals, tangents: (primals[0] @ w, 2.0 * (tangents[0] @ w)))
        return mpjax.autocast(closed, "float16")(x).astype(F32).sum()

    grad = jax.grad(loss, argnums=1)(W, X)
    np.testing.assert_allclose(grad, jnp.broadcast_to(2.0 * W.sum(1), (4, 6)), rtol=0.01, atol=0.01)
    with pytest.raises(UsageError, match="make that array an argument"):
        jax.grad(loss)(W, X)
