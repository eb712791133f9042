"""GELU, exact and by a hyperbolic tangent, SiLU, hard swish, and gates of all of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import (
    activated,
    gelu,
    gelu_gate,
    hard_sigmoid_gate,
    hard_swish,
    sigmoid_gate,
    silu,
    silu_gate,
    tanh_gelu,
    tanh_gelu_gate,
)
from mpjax.precision import apply_policy, name_scopes
from mpjax.precision.casting import equations


# From tables of the normal distribution: x times its share below x.
@pytest.mark.parametrize(("x", "expected"), [(-1.0, -0.158655), (0.0, 0.0), (1.0, 0.841345), (2.0, 1.954500)])
def test_gelu_is_as_published_and_the_tanh_is_near(x, expected):
    assert float(gelu(jnp.float32(x))) == pytest.approx(expected, abs=1e-6)
    assert float(tanh_gelu(jnp.float32(x))) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gelu_of_every_half_number_is_the_exact_one_rounded_to_a_half_millionth(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    exact = np.array([0.5 * float(x) * math.erfc(-float(x) / math.sqrt(2)) for x in numbers])
    error = np.abs(np.asarray(gelu(jnp.asarray(numbers))).astype(np.float64) - exact)
    assert np.all(error <= 5e-7 + np.abs(exact) * float(jnp.finfo(dtype).eps) / 2)
    assert np.all(np.asarray(gelu(jnp.asarray(numbers)))[numbers < 0] <= 0)


@pytest.mark.parametrize("function", [gelu, tanh_gelu, silu, hard_swish])
def test_values_whose_cube_float16_cannot_hold_keep_their_slope(function):
    x = jnp.array([-60000, -300, 300, 60000], jnp.float16)
    values, slopes = jax.vmap(jax.value_and_grad(function))(x)
    assert values.dtype == slopes.dtype == jnp.float16
    assert np.array_equal(values, [0, 0, 300, 60000])
    assert np.array_equal(slopes, [0, 0, 1, 1])


@pytest.mark.parametrize("function", [gelu, tanh_gelu, silu, hard_swish])
def test_only_the_input_is_kept_for_the_backward_pass(function):
    _, pull = jax.vjp(function, jnp.ones((3, 4), jnp.float16))
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [((3, 4), jnp.float16)]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "approximate"), [(gelu, False), (tanh_gelu, True)])
def test_slopes_of_either_mode_and_slopes_of_slopes_are_the_exact_ones(function, approximate):
    """Against float64: the derivatives that JAX derives in float32 are off by up to 2e-5 for the tanh."""
    x = np.linspace(-6, 6, 101).astype(np.float32)
    with jax.enable_x64(True):
        derived = jax.grad(lambda x: nnx.gelu(x, approximate=approximate))
        slopes, bends = (np.asarray(jax.vmap(f)(x.astype(np.float64))) for f in (derived, jax.grad(derived)))
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(x), slopes, atol=1e-6)
    np.testing.assert_allclose(jax.jvp(function, (x,), (jnp.ones_like(x),))[1], slopes, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(function)))(x), bends, atol=1e-6)


def test_the_backward_pass_may_recompute_its_input():
    """A barrier would make XLA store the sum of a product and its bias, beside the product."""
    slope = jax.jit(jax.grad(lambda x: jnp.sum(gelu(x)))).lower(jnp.ones(3))
    assert "optimization_barrier" not in slope.as_text()


@pytest.mark.parametrize(
    ("function", "at", "value", "slope"),
    [
        (silu, 1.0, 0.731059, 0.927671),
        (silu, -1.0, -0.268941, 0.072329),
        (hard_swish, 1.5, 1.125, 1.0),
        (hard_swish, -3.0, 0.0, 0.0),
        (hard_swish, 3.0, 3.0, 1.0),
        (hard_swish, 5.0, 5.0, 1.0),
        (hard_swish, -1.5, -0.375, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_silu_and_hard_swish_are_as_published(function, at, value, slope, dtype):
    found = jax.value_and_grad(function)(jnp.array(at, dtype))
    assert [each.dtype for each in found] == [dtype] * 2
    assert [float(each) for each in found] == pytest.approx([value, slope], rel=float(jnp.finfo(dtype).eps), abs=1e-6)


@pytest.mark.parametrize(("gate", "slope"), [(sigmoid_gate, 0.25), (hard_sigmoid_gate, 1 / 6)])
def test_the_gradient_of_a_gate_of_all_pixels_is_a_sum_in_float32(gate, slope):
    """Of 4096 ones in float16, added one by one, half would get lost: 2048 + 1 is 2048."""
    x, one = jnp.ones((1, 64, 64, 1), jnp.float16), jnp.zeros((1, 1, 1, 1), jnp.float16)
    total, pull = jax.vjp(gate, one, x)
    of_gate, of_x = pull(jnp.ones_like(total))
    assert (of_gate.dtype, of_gate.shape) == (jnp.float16, (1, 1, 1, 1))
    assert float(of_gate[0, 0, 0, 0]) == pytest.approx(4096 * slope, rel=2**-11)
    assert np.array_equal(of_x, np.full(x.shape, 0.5))


GATES = pytest.mark.parametrize(
    ("gate", "function"),
    [
        (silu_gate, jax.nn.silu),
        (tanh_gelu_gate, jax.nn.gelu),
        (gelu_gate, functools.partial(jax.nn.gelu, approximate=False)),
        (sigmoid_gate, jax.nn.sigmoid),
        (hard_sigmoid_gate, jax.nn.hard_sigmoid),
    ],
    ids=["silu", "tanh_gelu", "gelu", "sigmoid", "hard_sigmoid"],
)


@GATES
def test_a_gate_and_its_derivatives_are_those_of_the_product(gate, function):
    """Against float64: the derivatives that JAX derives in float32 are off by up to 1e-4."""
    x = np.linspace(-6, 6, 101).astype(np.float32)
    y = np.linspace(2, -2, 101).astype(np.float32)
    for turn in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1)), lambda f: jax.grad(jax.grad(f))):
        with jax.enable_x64(True):
            wide = x.astype(np.float64), y.astype(np.float64)
            expected = jax.device_get(jax.vmap(turn(lambda x, y: function(x) * y))(*wide))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), jax.vmap(turn(gate))(x, y), expected)


@GATES
def test_a_gate_is_computed_in_float32_and_keeps_its_two_inputs(gate, function):
    """Rounded in between, the product would be off by more than its own rounding."""
    x, y = (jax.random.normal(jax.random.key(seed), (64,), jnp.bfloat16) for seed in (0, 1))
    exact = function(x.astype(jnp.float32)) * y.astype(jnp.float32)
    assert np.array_equal(gate(x, y), exact.astype(jnp.bfloat16))
    _, pull = jax.vjp(gate, x, y)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [((64,), jnp.bfloat16)] * 2
    assert {slope.dtype for slope in pull(exact.astype(jnp.bfloat16))} == {jnp.dtype(jnp.bfloat16)}


def layer(policy):
    """A layer whose bias float16 does not hold: 1 + 2^-12 is 1 there."""
    model = nnx.Dict(up=nnx.Linear(4, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)))
    model.up.bias = nnx.Param(jnp.full(3, 1 + 2**-12))
    name_scopes(model)
    apply_policy(model, policy)
    return model.up


def test_a_bias_before_an_activation_is_added_unrounded_and_its_gradient_is_a_sum_in_float32():
    """Products are 2^-11 - 1: with the bias rounded to 1, results would be 2^-11. float16 has 5000 and 5004 only."""
    up = layer("mixed_float16")
    graph, params = nnx.split(up)
    x = jnp.full((5001, 4), (2**-11 - 1) / 4, jnp.float16)

    def loss(params, function):
        y = activated(nnx.merge(graph, params), function, x).value
        return jnp.sum(y.astype(jnp.float32)), y

    of_params, y = jax.grad(loss, has_aux=True)(params, jax.nn.relu)
    assert y.dtype == jnp.float16
    assert np.unique(y).tolist() == [2**-11 + 2**-12]
    assert of_params["bias"][...].tolist() == [5001.0] * 3


def test_of_a_layer_and_its_activation_the_product_is_kept_and_its_parts_keep_their_paths():
    """Products are 4. Under a policy that is not for half precision, the layer is called, and its sum is kept."""
    kept, scopes = {}, {}
    for policy in ("mixed_float16", "float32"):
        up = layer(policy)
        x = jnp.ones((7, 4), up.dtype)
        _, pull = jax.vjp(lambda x, up=up: activated(up, gelu, x).value, x)
        kept[policy] = [np.unique(leaf).tolist() for leaf in jax.tree.leaves(pull) if leaf.shape == (7, 3)]
        found = equations(jax.make_jaxpr(lambda x, up=up: activated(up, jnp.sin, x).value)(x))
        scopes[policy] = [scope for scope, eqn in found if eqn.primitive.name in ("add", "dot_general")]
    assert kept == {"mixed_float16": [[4.0]], "float32": [[5 + 2**-12]]}
    assert scopes == {"mixed_float16": ["up"] * 2, "float32": ["up"] * 2}


@pytest.mark.parametrize(("function", "constant"), [(gelu, "constant(0.398942"), (tanh_gelu, "constant(0.134145")])
def test_a_cpu_computes_the_slope_once_for_all_products_that_need_it(function, constant):
    def loss(x, up, bias, down):
        return jnp.sum((function(x @ up + bias.astype(x.dtype)) @ down).astype(jnp.float32))

    shapes = [((64, 32), jnp.float16), ((32, 128), jnp.float16), ((1, 128), jnp.float32), ((128, 32), jnp.float16)]
    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    program = grad.lower(*[jax.ShapeDtypeStruct(*shape) for shape in shapes]).compile().as_text()
    assert program is not None
    assert program.count(constant) == 1  # stands in the slope alone
