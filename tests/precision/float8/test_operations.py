"""Which products autocast runs in float8."""

import functools

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.precision.casting.walk import equations


def products(fn, *args, policy="mixed_float8"):
    jaxpr = jax.make_jaxpr(mpjax.autocast(fn, policy))(*args)
    return [str(eqn.invars[0].aval.dtype) for _, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]


X, W = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)


def test_a_product_with_a_weight_is_in_float8():
    assert products(jnp.dot, X, W) == ["float8_e4m3fn"]


def test_its_backward_products_are_too():
    fn = mpjax.autocast(lambda w, x: jnp.sum(jnp.dot(x, w)), "mixed_float8")
    jaxpr = jax.make_jaxpr(jax.grad(fn, (0, 1)))(W, X)
    dots = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert [{str(v.aval.dtype) for v in eqn.invars} for eqn in dots] == [
        {"float8_e4m3fn"},
        {"float8_e4m3fn", "float8_e5m2"},
        {"float8_e4m3fn", "float8_e5m2"},
    ]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda q, k: jnp.einsum("bqh,bkh->bqk", q, k), ((2, 64, 64), (2, 64, 64))),
        (jnp.dot, ((8, 64), (64, 32))),
        (jnp.dot, ((8, 64), (64, 72))),
        (lambda x, w: jnp.dot(x, w, precision="highest"), ((8, 64), (64, 64))),
    ],
    ids=["attention", "small", "uneven", "with a precision of the user's"],
)
def test_others_are_in_bfloat16_or_as_asked(fn, shapes):
    found = products(fn, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert found == ["bfloat16"]


def test_operands_that_the_user_made_float8_are_left_alone():
    x, w = (jax.ShapeDtypeStruct(s.shape, jnp.float8_e4m3fn) for s in (X, W))
    assert products(lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.float32), x, w) == ["float8_e4m3fn"]


def test_rules_by_scope_take_products_out_and_in():
    def fn(x, w):
        with jax.named_scope("a"):
            x = x @ w
        with jax.named_scope("b"):
            return x @ w

    def by_scope(policy):
        jaxpr = jax.make_jaxpr(mpjax.autocast(fn, policy))(X, W)
        dots = [(path, eqn) for path, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        return {path: str(eqn.invars[0].aval.dtype) for path, eqn in dots}

    assert by_scope("mixed_float8;a=bfloat16") == {"a": "bfloat16", "b": "float8_e4m3fn"}
    assert by_scope("mixed_bfloat16;a=float8") == {"a": "float8_e4m3fn", "b": "bfloat16"}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_gradients_of_gradients_are_right_within_autocast_and_outside_of_it(scale):
    x, w, c = jax.random.normal(jax.random.key(0), (3, 64, 64))

    def penalty(w, x, c, around=lambda f: f):
        def loss(x, w, c):
            return scale * jnp.sum(c * jnp.sin(jnp.dot(x, w) / 8))

        return jnp.sum(jax.grad(around(loss))(x, w, c) ** 2)

    exact = jax.grad(penalty)(w, x, c)
    autocast = functools.partial(mpjax.autocast, policy="mixed_float8")
    for found in (
        jax.grad(autocast(penalty))(w, x, c),
        jax.grad(lambda *given: penalty(*given, around=autocast))(w, x, c),
    ):
        assert float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < 0.15
