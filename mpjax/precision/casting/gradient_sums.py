"""Adds the gradients of a half-precision array that is read many times in float32, without a float32 copy of the array.

A pair of functions takes the derivative off the array, through a float32 array of zeros that only the derivative reads:

    total = sum_of_gradients(x)
    y = adding_to(total, jax.lax.stop_gradient(x))  # as often as x is read; equal to x
"""

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32


@jax.custom_jvp
def sum_of_gradients(array: jax.Array) -> jax.Array:
    """Returns float32 zeros, whose gradient, rounded once, is the gradient of `array`."""
    return jnp.zeros(array.shape, FLOAT32)


@sum_of_gradients.defjvp
def _(primals, tangents):
    return sum_of_gradients(*primals), tangents[0].astype(FLOAT32)


@jax.custom_jvp
def adding_to(total: jax.Array, array: jax.Array) -> jax.Array:
    """Returns `array`, whose gradient is added to that of `total`."""
    del total
    return array


@adding_to.defjvp
def _(primals, tangents):
    return adding_to(*primals), tangents[0].astype(primals[1].dtype)
