"""GELU, exact and by a hyperbolic tangent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models.activations import gelu, tanh_gelu


# From tables of the normal distribution: x times its share below x.
@pytest.mark.parametrize(("x", "expected"), [(-1.0, -0.158655), (0.0, 0.0), (1.0, 0.841345), (2.0, 1.954500)])
def test_gelu_is_as_published_and_the_tanh_is_near(x, expected):
    assert float(gelu(jnp.float32(x))) == pytest.approx(expected, abs=1e-6)
    assert float(tanh_gelu(jnp.float32(x))) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("function", [gelu, tanh_gelu])
def test_values_whose_cube_float16_cannot_hold_keep_their_slope(function):
    x = jnp.array([-60000, -300, 300, 60000], jnp.float16)
    values, slopes = jax.vmap(jax.value_and_grad(function))(x)
    assert values.dtype == slopes.dtype == jnp.float16
    assert np.array_equal(values, [0, 0, 300, 60000])
    assert np.array_equal(slopes, [0, 0, 1, 1])


@pytest.mark.parametrize("function", [gelu, tanh_gelu])
def test_only_the_input_is_kept_for_the_backward_pass(function):
    _, pull = jax.vjp(function, jnp.ones((3, 4), jnp.float16))
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [((3, 4), jnp.float16)]


@pytest.mark.parametrize(("function", "approximate"), [(gelu, False), (tanh_gelu, True)])
def test_slopes_of_either_mode_and_slopes_of_slopes_are_those_jax_derives(function, approximate):
    def derived(x):
        return nnx.gelu(x, approximate=approximate)

    x = jnp.linspace(-6, 6, 101)
    expected = jax.vmap(jax.grad(derived))(x)
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(x), expected, atol=1e-6)
    np.testing.assert_allclose(jax.jvp(function, (x,), (jnp.ones_like(x),))[1], expected, atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(jax.grad(function)))(x), jax.vmap(jax.grad(jax.grad(derived)))(x), atol=1e-6
    )


@pytest.mark.parametrize(("function", "constant"), [(gelu, "constant(0.398942"), (tanh_gelu, "constant(0.134145")])
def test_a_cpu_computes_the_slope_once_for_all_products_that_need_it(function, constant):
    def loss(x, up, bias, down):
        return jnp.sum((function(x @ up + bias.astype(x.dtype)) @ down).astype(jnp.float32))

    shapes = [((64, 32), jnp.float16), ((32, 128), jnp.float16), ((1, 128), jnp.float32), ((128, 32), jnp.float16)]
    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    program = grad.lower(*[jax.ShapeDtypeStruct(*shape) for shape in shapes]).compile().as_text()
    assert program is not None
    assert program.count(constant) == 1  # stands in the slope alone
