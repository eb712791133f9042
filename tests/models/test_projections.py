"""Query, key and value of one input: what stays as the layers' own calls, and what is moved behind attention."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import Attention, called, project
from mpjax.precision import Policy, apply_policy, name_scopes, wrap
from mpjax.precision.casting import equations


X = jax.random.normal(jax.random.key(0), (2, 6, 16))
LAYERS = ("query", "key", "value", "out")


def module(policy="mixed_bfloat16"):
    """Attention of two heads with eight features, whose biases are not zero."""
    normal = nnx.initializers.normal(0.3)
    model = nnx.jit(lambda: Attention(16, 2, kernel_init=normal, out_init=normal, rngs=nnx.Rngs(0)))()
    for seed, name in enumerate(LAYERS):
        layer = getattr(model, name)
        layer.bias[...] = np.random.default_rng(seed).normal(size=layer.bias.shape).astype(np.float32)
    name_scopes(model)
    apply_policy(model, policy)
    return model


def gradients(model, x=X):
    """Gradients of a function of the output, by the path of the parameter."""
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x).astype(jnp.float32)))

    found = nnx.to_flat_state(jax.jit(jax.grad(loss))(params))
    return {"/".join(map(str, path)): np.asarray(leaf[...], np.float32) for path, leaf in found}


def products(model):
    """The named scopes of all products of a forward and a backward pass, sorted."""
    graph, params = nnx.split(model, nnx.Param)

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)(x).astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, X)
    return sorted(scope for scope, eqn in equations(traced) if eqn.primitive.name == "dot_general")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "epsilon"), [("mixed_float16", 2**-10), ("mixed_bfloat16", 2**-7)])
def test_biases_behind_attention_give_what_they_give_before_it(policy, epsilon):
    exact, half = module("float32"), module(policy)
    of_exact, of_half = gradients(exact), gradients(half)
    largest = max(float(np.abs(gradient).max()) for gradient in of_exact.values())
    for name, expected in of_exact.items():
        np.testing.assert_allclose(of_half[name], expected, atol=2 * epsilon * largest, err_msg=name)
    np.testing.assert_allclose(jax.jit(half)(X).astype(jnp.float32), exact(X), atol=8 * epsilon)


def test_the_softmax_cancels_the_bias_of_the_keys():
    """In float32, where it is added, its gradient is rounding noise."""
    assert 0 < np.abs(gradients(module("float32"))["key/bias"]).max() < 1e-5
    assert not gradients(module())["key/bias"].any()


def test_the_forward_pass_has_the_products_of_the_modules_and_the_backward_pass_one_for_all():
    attention = [""] * 6  # two products, and two gradients of each
    assert products(module()) == ["", ""] + attention + ["key"] + ["out"] * 3 + ["query", "value"]
    assert products(module("float32")) == attention + ["key"] * 3 + ["out"] * 3 + ["query"] * 3 + ["value"] * 3


def test_each_kernel_is_cast_in_the_scope_of_its_layer():
    """So that a diagnosis names the layer whose kernel overflows."""
    traced = jax.make_jaxpr(module())(X)
    kernels = [
        scope
        for scope, eqn in equations(traced)
        if "convert" in eqn.primitive.name
        and eqn.invars[0].aval.dtype == jnp.float32
        and eqn.outvars[0].aval.size == 256
    ]
    assert sorted(kernels) == ["key", "out", "query", "value"]


@pytest.mark.slow
def test_gradients_of_biases_are_sums_in_float32():
    """float16 has 5000 and 5004 and nothing between."""
    model = module("mixed_float16")
    model.out.kernel[...] = jnp.ones((2, 8, 16)) / 16
    graph, params = nnx.split(model, nnx.Param)
    x = jnp.zeros((5001, 1, 16), jnp.float16)

    def loss(params):
        model = nnx.merge(graph, params)
        query = project(x, model.query, model.key, model.value, model.out).query
        return jnp.sum(model(x).astype(jnp.float32)) + jnp.sum(query.astype(jnp.float32))

    found = jax.grad(loss)(params)
    assert {name: np.unique(found[name]["bias"][...]).tolist() for name in LAYERS} == {
        "query": [5001],
        "key": [0],
        "value": [5001],
        "out": [5001],
    }


@dataclasses.dataclass(frozen=True)
class Doubles:
    """A wrapper of the user's own."""

    depth: ClassVar[int] = 9

    def __call__(self, call, module, *args):
        return 2 * call(module, *args)


class Own(nnx.LinearGeneral):
    """A layer of the user's own."""


def _with_product(model):
    model.query.dot_general = lambda x, y, *args, **kwargs: 2 * jax.lax.dot_general(x, y, *args, **kwargs)


def _with_promotion(model):
    model.key.promote_dtype = lambda arrays, dtype: [None if x is None else 2 * x.astype(dtype) for x in arrays]


def _without_bias(model):
    model.key.bias, model.key.use_bias = None, False


def _in_another_dtype(model):
    model.key.dtype = jnp.float16


def _of_a_subclass(model):
    model.value = Own(16, (2, 8), rngs=nnx.Rngs(1))
    model.value.dtype = jnp.bfloat16


def _wrapped(model):
    wrap(model.out, Doubles())


@pytest.mark.parametrize(
    "change",
    [
        *(_without_bias, _in_another_dtype, _wrapped),
        *(pytest.param(change, marks=pytest.mark.slow) for change in (_with_product, _with_promotion, _of_a_subclass)),
    ],
)
def test_layers_of_the_users_own_are_called_as_they_are(change):
    model = module()
    change(model)
    x = X.astype(jnp.bfloat16)
    found = project(x, model.query, model.key, model.value, model.out)
    assert found.out is model.out
    for name, array in zip(LAYERS, (found.query, found.key, found.value), strict=False):
        assert np.array_equal(array, getattr(model, name)(x)), name


@pytest.mark.parametrize(
    "rule",
    [
        "value=params=bfloat16,compute=bfloat16,output=float32",
        *(pytest.param(f"{name}=float32", marks=pytest.mark.slow) for name in ("query", "key")),
    ],
)
def test_a_rule_for_one_of_them_keeps_three_products(rule):
    ruled = module(f"params=float32,compute=bfloat16,output=bfloat16;{rule}")
    assert products(ruled) == products(module("float32"))


def test_heads_that_are_divided_over_devices_keep_three_products():
    model = module()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        divided = products(model)
    assert divided == products(module("float32"))


FLOAT8 = Policy("float32", "bfloat16", "float32", products="float8")


def test_in_float8_the_three_kernels_are_one_operand_with_one_scale():
    model = module(FLOAT8)
    model.query.kernel[...], model.key.kernel[...] = jnp.ones((16, 2, 8)), jnp.full((16, 2, 8), 2.0**-18)
    x = jnp.ones((1, 1, 16), jnp.bfloat16)
    # Scaled by 2^8 for the largest, 1, the smallest number of e4m3 is 2^-17, and 2^-18 rounds to zero.
    assert jnp.all(project(x, model.query, model.key, model.value, model.out).key == 0)
    model.key.bias[...] = jnp.zeros((2, 8))
    assert jnp.all(model.key(x) == 2.0**-14)


def test_in_float8_query_key_and_value_have_two_products_in_the_backward_pass():
    scopes = products(module(FLOAT8))
    # Three forward and these two in the scopes of the layers, and three of the output projection.
    assert [sum(scope.endswith(name) for scope in scopes) for name in LAYERS] == [3, 1, 1, 3]


@pytest.mark.slow
def test_gradients_in_float8_are_no_less_exact_than_those_of_three_layers(monkeypatch):
    expected = gradients(module("float32"))
    joint = gradients(module(FLOAT8))
    monkeypatch.setattr("mpjax.models.attention.project", called)
    separate = gradients(module(FLOAT8))
    for path in sorted(set(expected) - {"key/bias"}):  # whose gradient is zero
        errors = [np.linalg.norm(found[path] - expected[path]) for found in (joint, separate)]
        assert errors[0] < errors[1], path


@pytest.mark.slow
def test_a_gradient_within_a_loss_is_right_in_float8():
    def penalty(policy):
        graph, params = nnx.split(module(policy), nnx.Param)

        def loss(x):
            return jnp.sum(jnp.sin(nnx.merge(graph, params)(x).astype(jnp.float32)))

        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x)))))(X)

    found, expected = penalty(FLOAT8), penalty("float32")
    assert jnp.linalg.norm(found - expected) < 0.3 * jnp.linalg.norm(expected)
