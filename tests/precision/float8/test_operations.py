"""Which products autocast runs in float8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.errors import PrecisionWarning
from mpjax.precision.casting import equations


def products(fn, *args, policy="mixed_float8"):
    jaxpr = jax.make_jaxpr(mpjax.autocast(fn, policy))(*args)
    return sorted(str(eqn.invars[0].aval.dtype) for _, eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")


X, W = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)


def shaped(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


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
        (lambda x, w: jnp.dot(x, w, precision="highest"), ((64, 64), (64, 64))),
        (jnp.dot, ((10, 64), (64, 64))),
        (lambda w, x: w @ x, ((10, 64), (64, 64))),
    ],
    ids=["attention", "small", "uneven", "with a precision of the user's", "small batch", "small, weight first"],
)
def test_others_are_in_bfloat16_or_as_asked_and_that_is_said(fn, shapes):
    with pytest.warns(PrecisionWarning, match="no product of the function is in float8"):
        assert products(fn, *shaped(*shapes)) == ["bfloat16"]


@pytest.mark.parametrize("setting", [None, "default", "high", "highest", "float32", "tensorfloat32", "bfloat16"])
def test_the_setting_for_all_products_does_not_switch_float8_off(setting):
    with jax.default_matmul_precision(setting):
        assert products(jnp.dot, X, W) == ["float8_e4m3fn"]


def test_a_product_that_asks_for_the_default_precision_is_in_float8():
    assert products(lambda x, w: jnp.dot(x, w, precision="default"), X, W) == ["float8_e4m3fn"]


@pytest.mark.parametrize("batch", [1, 24, 64])
@pytest.mark.parametrize(("out", "dtype"), [(128, "float8_e4m3fn"), (10, "bfloat16")])
@pytest.mark.parametrize("weight_first", [True, False])
def test_the_weight_of_parameters_decides_and_not_the_batch(batch, out, dtype, weight_first):
    def mlp(params, x):
        for w in params:
            x = jnp.matmul(w, x.T).T if weight_first else x @ w
        return x

    sides = [(64, 64), (out, 64) if weight_first else (64, out)]
    assert products(mlp, shaped(*sides), *shaped((batch, 64))) == sorted(["float8_e4m3fn", dtype])


@pytest.mark.parametrize(("out", "dtype"), [(128, "float8_e4m3fn"), (10, "bfloat16")])
def test_a_layer_of_equinox_multiplies_its_weight_from_the_left(out, dtype):
    eqx = pytest.importorskip("equinox")
    first, last = (eqx.nn.Linear(64, size, key=jax.random.key(0)) for size in (64, out))
    found = products(lambda model, x: jax.vmap(lambda row: model[1](model[0](row)))(x), (first, last), *shaped((8, 64)))
    assert found == sorted(["float8_e4m3fn", dtype])


@pytest.mark.parametrize(("out", "dtype"), [(128, "float8_e4m3fn"), (10, "bfloat16")])
def test_a_layer_of_nnx_multiplies_from_the_right(out, dtype):
    layers = nnx.List([nnx.Linear(64, size, rngs=nnx.Rngs(0)) for size in (64, out)])
    found = products(lambda model, x: model[1](model[0](x)), layers, *shaped((8, 64)))
    assert found == sorted(["float8_e4m3fn", dtype])


@pytest.mark.parametrize("module", [True, False])
def test_attention_scores_without_batch_axes_stay_wide(module):
    def attention(params, x):
        q, k, v = (x @ w for w in params)
        return jax.nn.softmax(q @ k.T) @ v

    kernels = [jnp.ones((64, 64))] * 3
    params = nnx.List([nnx.Param(kernel) for kernel in kernels]) if module else kernels
    assert products(attention, params, *shaped((128, 64))) == ["bfloat16"] * 2 + ["float8_e4m3fn"] * 3


@pytest.mark.slow
def test_a_weight_from_the_left_is_multiplied_as_one_from_the_right():
    w = jax.random.normal(jax.random.key(0), (2, 64, 64))
    x = jax.random.normal(jax.random.key(1), (32, 64))

    def left(params, x):
        return jnp.sum(jnp.sin(params[1] @ (params[0] @ x.T)))

    def right(params, x):
        return jnp.sum(jnp.sin((x @ params[0].T) @ params[1].T))

    rounds_as_asked = {"xla_allow_excess_precision": False}  # else XLA 0.10 leaves roundings out of one of the two
    for policy in ("mixed_float8", "mixed_float8_rowwise", "mixed_mxfp8"):
        gradients = (jax.grad(mpjax.autocast(fn, policy), (0, 1)) for fn in (left, right))
        one, other = (jax.jit(fn, compiler_options=rounds_as_asked)(list(w), x) for fn in gradients)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


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


@pytest.mark.slow
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
