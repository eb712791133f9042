"""The smooth step that Transformers and ConvNeXt have between two linear layers."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.precision.dtypes import FLOAT32, widest


Function = Callable[[jax.Array], jax.Array]


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's share below x (Hendrycks & Gimpel, 2016, arXiv:1606.08415)."""
    return _in_float32(lambda x: nnx.gelu(x, approximate=False), _gelu_slope, x)


def tanh_gelu(x: jax.Array) -> jax.Array:
    """The same paper's approximation by a hyperbolic tangent."""
    return _in_float32(lambda x: nnx.gelu(x, approximate=True), _tanh_gelu_slope, x)


def _gelu_slope(x: jax.Array) -> jax.Array:
    share = 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    return share + x * jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


def _tanh_gelu_slope(x: jax.Array) -> jax.Array:
    width, cube = math.sqrt(2 / math.pi), 0.044715
    bend = jnp.tanh(width * (x + cube * x**3))
    return 0.5 * (1 + bend) + 0.5 * x * (1 - bend**2) * width * (1 + 3 * cube * x**2)


def _in_float32(function: Function, slope: Function, x: jax.Array) -> jax.Array:
    """A function of each value by itself, in float32: cubes of 41 are too large for float16.

    The slope is given because that which JAX derives, from one operation to the next, moves 6 % more bytes in a step of
    ViT-S on a GPU.
    """

    @jax.custom_jvp
    def wide(x: jax.Array) -> jax.Array:
        return function(x.astype(widest(x.dtype, FLOAT32))).astype(x.dtype)

    @wide.defjvp
    def wide_jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        dtype = widest(x.dtype, FLOAT32)
        return wide(x), (tangent.astype(dtype) * slope(x.astype(dtype))).astype(x.dtype)

    # The backward pass computes the slope, so that what is kept for it is x alone, not float32.
    return jax.checkpoint(wide)(x)
