"""Gradients of convolutions are laid out as their parameters while they are in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.precision.casting import equations
from mpjax.training import row_major, row_major_before_casts


def loss(params, scale):
    """The two kernels and the bias of a convolution whose kernels are used in float16."""
    first, second, bias = params
    cast = first.astype(jnp.float16) * scale.astype(jnp.float16)
    return jnp.sum(jnp.sin(cast).astype(jnp.float32)) + jnp.sum(jnp.cos(second) * scale) + jnp.sum(bias**2)


PARAMS = [jnp.linspace(-1, 1, 16).reshape(2, 2, 2, 2), jnp.linspace(0, 1, 16).reshape(1, 1, 4, 4), jnp.arange(3.0)]
GIVEN = PARAMS, jnp.float32(1.3)


def laid_out(*given):
    run = jax.value_and_grad(loss)
    return row_major_before_casts(run, lambda found: found[1])(*given)


def test_numbers_stay_bit_for_bit():
    expected, found = jax.jit(jax.value_and_grad(loss))(*GIVEN), jax.jit(laid_out)(*GIVEN)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_gradient_is_laid_out_before_it_is_cast_to_float32():
    barriers = [
        str(eqn.invars[0].aval.dtype)
        for _, eqn in equations(jax.make_jaxpr(laid_out)(*GIVEN).jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert barriers == ["float16", "float32"]  # the first kernel, and the second; none of the bias


def test_values_of_the_surrounding_program_are_those_of_the_function():
    """A training step's function refers to parameters that are traced already."""

    @jax.jit
    def step(params, scale):
        return row_major_before_casts(lambda scale: jax.grad(loss)(params, scale), lambda found: found)(scale)

    jax.tree.map(np.testing.assert_array_equal, step(*GIVEN), jax.jit(jax.grad(loss))(*GIVEN))


@pytest.mark.parametrize(("shape", "barriers"), [((2, 2, 2, 2), 1), ((2, 2, 2), 0)])
def test_only_arrays_of_four_axes_are_laid_out(shape, barriers):
    program = str(jax.make_jaxpr(row_major)(jnp.zeros(shape)))
    assert (program.count("optimization_barrier"), program.count("layout_constraint[")) == (barriers, barriers)
