"""Activations that move few bytes on a GPU: ReLU, and GELU, SiLU, hard swish and gates, computed in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.precision.calls import scope_of
from mpjax.precision.dtypes import FLOAT32, HALF, widest
from mpjax.precision.layers import only_sums, without_bias


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


Function = Callable[[jax.Array], jax.Array]


@jax.custom_jvp
def relu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes max(x, 0). The backward pass reads only the result, which the next layer keeps anyway."""
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    y = relu(*primals)
    # Not y > 0: XLA recognizes it as x > 0, and would read every term of the sum x.
    return y, jnp.where(y == 0, 0, tangents[0])


def gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes x * Phi(x), where Phi is the normal CDF (Hendrycks & Gimpel, 2016, arXiv:1606.08415).

    It computes in float32 or wider, and the result has the dtype of x. Results in half precision are rounded, and off
    by at most 5e-7 besides.
    """
    return _in_float32(_half_gelu if x.dtype in HALF else _exact_gelu, _gelu_slope, x)


def tanh_gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes the tanh approximation of `gelu` in float32 or wider; the result has the dtype of x."""
    return _in_float32(lambda x: nnx.gelu(x, approximate=True), _tanh_gelu_slope, x)


def silu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes x * sigmoid(x), also called swish, in float32 or wider; the result has the dtype of x."""
    return _in_float32(_silu, _silu_slope, x)


def quick_gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes x * sigmoid(1.702 x), the approximation of `gelu` in CLIP, in the dtypes of `silu`."""
    return _in_float32(lambda x: _silu(1.702 * x) / 1.702, lambda x: _silu_slope(1.702 * x), x)


def hard_swish(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes x * clip(x / 6 + 1/2, 0, 1) (Howard et al., 2019, arXiv:1905.02244), in the dtypes of `silu`.

    Its derivative at -3 is 0, and at 3 it is 1.
    """
    return _in_float32(_hard_swish, _hard_swish_slope, x)


_exact_gelu = functools.partial(nnx.gelu, approximate=False)


def _half_gelu(x: jax.Array) -> jax.Array:
    # As PyTorch does. Flax's erfc is exact far below zero too, by 60 operations in place of 20: with them, the kernel
    # of a GELU of ViT-B took 0.50 ms on an H200 that moves its memory in 0.15.
    return 0.5 * x * jnp.maximum(1 + jax.lax.erf(x * math.sqrt(0.5)), 0)


def _gelu_slope(x: jax.Array) -> jax.Array:
    cdf = 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    return cdf + x * jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


def _tanh_gelu_slope(x: jax.Array) -> jax.Array:
    width, cube = math.sqrt(2 / math.pi), 0.044715
    bend = 2 * width * (x + cube * x**3)
    # (1 + tanh) / 2 and (1 - tanh) / 2, without cancellation. XLA would keep a tanh of the forward pass in float32.
    above, below = jax.nn.sigmoid(bend), jax.nn.sigmoid(-bend)
    return above + 2 * x * above * below * width * (1 + 3 * cube * x**2)


def _in_float32(function: Function, slope: Function, x: jax.Array) -> jax.Array:
    """Applies an elementwise function in float32 (or wider) and casts the result to the dtype of x.

    In float16, the cube of 41 overflows. `slope` computes the derivative of `function`. JAX's own derivative, operation
    by operation, moves 6 % more bytes in a step of ViT-S on a GPU.
    """

    @jax.custom_jvp
    def wide(x: jax.Array) -> jax.Array:
        return function(x.astype(widest(x.dtype, FLOAT32))).astype(x.dtype)

    @wide.defjvp
    def wide_jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        dtype = widest(x.dtype, FLOAT32)
        return wide(x), (tangent.astype(dtype) * _once(slope, x.astype(dtype))).astype(x.dtype)

    # The backward pass recomputes the slope, so that only x is kept, and nothing in float32.
    return _recomputed(wide)(x)


_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
"""A checkpoint without a barrier, so that XLA may recompute x as well.

With a barrier, XLA would store the sum of a product and its bias beside the product.
"""


def silu_gate(gate: Float[Array, "*S"], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes silu(gate) * x, as in SwiGLU (Shazeer, 2020, arXiv:2002.05202).

    It computes in the wider of float32 and the dtype of x, and the result has the dtype of x.
    """
    return _gate_in_float32(_silu, _silu_slope, gate, x)


def tanh_gelu_gate(gate: Float[Array, "*S"], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes tanh_gelu(gate) * x, as in GeGLU of the same paper, in the dtypes of `silu_gate`."""
    return _gate_in_float32(functools.partial(nnx.gelu, approximate=True), _tanh_gelu_slope, gate, x)


def gelu_gate(gate: Float[Array, "*S"], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes gelu(gate) * x, with the exact `gelu`, in the dtypes of `silu_gate`."""
    return _gate_in_float32(functools.partial(nnx.gelu, approximate=False), _gelu_slope, gate, x)


def sigmoid_gate(gate: Float[Array, "*S"], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes sigmoid(gate) * x, in the dtypes of `silu_gate`; a gate of 1 pixel applies to all pixels of x.

    The gradient of such a gate is a sum over the pixels in float32 or wider.
    """
    return _gate_in_float32(jax.nn.sigmoid, _sigmoid_slope, gate, x)


def hard_sigmoid_gate(gate: Float[Array, "*S"], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes clip(gate / 6 + 1/2, 0, 1) * x, as `sigmoid_gate` does; its derivative by a gate of -3 or 3 is 0."""
    return _gate_in_float32(_hard_sigmoid, _hard_sigmoid_slope, gate, x)


def _sigmoid_slope(x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)


def _hard_sigmoid(x: jax.Array) -> jax.Array:
    return jnp.clip(x / 6 + 0.5, 0, 1)


def _hard_sigmoid_slope(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < 3, 1 / 6, 0.0).astype(x.dtype)


def _hard_swish(x: jax.Array) -> jax.Array:
    return x * _hard_sigmoid(x)


def _hard_swish_slope(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) < 3, x / 3 + 0.5, _hard_sigmoid(x))


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def _silu_slope(x: jax.Array) -> jax.Array:
    sigmoid = jax.nn.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _gate_in_float32(function: Function, slope: Function, gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes function(gate) * x in float32 (or wider) and casts to the dtype of x, as `_in_float32` does.

    Only the two inputs are kept for the backward pass. `slope` computes the derivative of `function`.
    """
    dtype = widest(x.dtype, FLOAT32)

    @jax.custom_jvp
    def product(gate: jax.Array, x: jax.Array) -> jax.Array:
        return (function(gate.astype(dtype)) * x.astype(dtype)).astype(x.dtype)

    @product.defjvp
    def product_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        wide, wide_x = (value.astype(dtype) for value in primals)
        of_gate, of_x = (value.astype(dtype) for value in tangents)
        change = of_gate * (_once(slope, wide) * wide_x) + of_x * _once(function, wide)
        return product(*primals), change.astype(primals[1].dtype)

    return _recomputed(product)(gate, x)


class Activated(NamedTuple):
    """The result of a layer and an activation.

    Attributes:
      value: the result, [..., H].
      again: a function without arguments that computes `value` anew from the layer's product, so that `value` need not
        stay in memory.
    """

    value: jax.Array
    again: Callable[[], jax.Array]


def activated(layer: nnx.Linear, function: Function, x: Float[Array, "*S D"]) -> Activated:
    """Computes function(layer(x)); under a half-precision policy, only the product is kept for the backward pass.

    By default, XLA would store the sum of product and bias as well. Here the sum is computed in float32 and rounded
    once. Other layers (subclasses, without a bias, in float32) are called as they are, and `again` returns the value.
    """
    if type(layer) is not nnx.Linear or layer.bias is None or not only_sums(layer):
        value = function(layer(x))
        return Activated(value, lambda: value)

    @jax.checkpoint
    def biased(product: jax.Array, bias: jax.Array) -> jax.Array:
        dtype = widest(product.dtype, bias.dtype, FLOAT32)
        with scope_of(layer):
            added = product.astype(dtype) + jnp.broadcast_to(bias.astype(dtype), product.shape)
            added = added.astype(product.dtype)
        return function(added)

    product, bias = without_bias(layer)(x), layer.bias[...]
    # Behind a barrier: XLA would compute equal operations once.
    return Activated(biased(product, bias), lambda: biased(jax.lax.optimization_barrier(product), bias))


def _once(function: Function, x: jax.Array) -> jax.Array:
    """Applies a function and divides the result by one, so that XLA:CPU computes it once.

    XLA:CPU fuses a value into each of its consumers, including transposed copies, unless the value ends in a division.
    """
    return function(x) / jnp.where(jnp.isnan(x), x, 1)  # a plain 1 would be simplified away
