"""Projects one input to query, key and value, with one product in the backward pass and without passes for biases.

Under a half-precision policy, the layers' own calls would move a fifth of a Transformer block's bytes on a GPU: they
add three biases, sum three gradients of the input, and read each operand once for each product.

Shapes: B batch, T positions, D width, N heads, H features per head.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.precision.calls import scope_of
from mpjax.precision.dtypes import FLOAT32, HALF, widest
from mpjax.precision.float8.layers import is_quantised, scaled_by_largest_of, scales_whole_operands
from mpjax.precision.float8.matrices import Largest
from mpjax.precision.float8.products import gradients, reverse_mode
from mpjax.precision.float8.scaling import largest_of_parts
from mpjax.precision.layers import changed, only_sums, without_bias


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class Projected(NamedTuple):
    """The result of the projections before attention.

    Attributes:
      query: [B, T, N, H].
      key: [B, T, N, H].
      value: [B, T, N, H].
      out: the layer that projects the output of attention, not yet called.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: nnx.LinearGeneral


def called(x: Float[Array, "B T D"], query: Any, key: Any, value: Any, out: Any) -> Projected:
    """Projects x by calling the layers `query`, `key` and `value` as they are; returns `out` itself, not called."""
    return Projected(query(x), key(x), value(x), out)


def project(x: Float[Array, "B T D"], query: Any, key: Any, value: Any, out: Any) -> Projected:
    """Projects x to query, key and value of softmax attention; drops the key bias and moves the value bias into `out`.

    The softmax cancels the bias of the keys, which adds one number to all scores of a query: its gradient is zero. The
    weights of a query sum to one, so the bias of the values passes through attention. The output projection turns it
    into a constant, which is added to the bias of the returned layer.

    It does so only under a half-precision policy, for layers with biases that agree in shapes and dtypes. All other
    layers are called unchanged, as by `called`. Layers in float8 that do not scale whole operands are called one by
    one, without these two biases. The layers that are passed do not change.

    Args:
      x: the features.
      query: a `nnx.LinearGeneral` from D to [N, H].
      key: the same.
      value: the same.
      out: a `nnx.LinearGeneral` from [N, H] to D, which is not called.
    """
    layers = (query, key, value)
    if not all(map(_is_plain, (*layers, out))) or len({_kind(layer) for layer in layers}) > 1:
        return called(x, query, key, value, out)
    bias, kernel = value.bias[...], out.kernel[...]
    if kernel.shape[:-1] != bias.shape:
        return called(x, query, key, value, out)
    wide = widest(bias.dtype, kernel.dtype, FLOAT32)
    # Cast once, for the constant and for the layer: a parameter is gathered in half precision only if a cast to half
    # precision is its only use.
    kernel = _half_kernel(out)
    with scope_of(value):
        constant = jnp.sum(bias.astype(wide)[..., None] * kernel.astype(wide), axis=(0, 1))
    out = changed(out, kernel=nnx.Param(kernel), bias=nnx.Param(out.bias[...].astype(wide) + constant))
    if is_quantised(query) and not scales_whole_operands(query):
        return Projected(query(x), without_bias(key)(x), without_bias(value)(x), out)
    kernels = jnp.stack([_half_kernel(layer) for layer in layers], axis=1)
    products = _products_in_float8 if is_quantised(query) else _products
    of_query, of_key, of_value = products(layers, x.astype(query.dtype), kernels, query.bias[...])
    return Projected(of_query, of_key, of_value, out)


def _products(layers: tuple, x: jax.Array, kernels: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    """Calls three layers on x with `kernels` [D, 3, N, H] in place of their own, and the first with `bias` [N, H].

    The other two have no bias. The derivative with respect to x is one product, not three.
    """
    forward = functools.partial(_called_with, layers)
    products = jax.custom_jvp(forward)

    @products.defjvp
    def products_jvp(primals, tangents):
        (x, kernels, bias), (of_x, of_kernels, of_bias) = primals, tangents
        # The derivative by the kernels is written once, in half precision. Without a barrier, what reads each of the
        # three may each finish the sums of the product again.
        of_kernels = jax.lax.optimization_barrier(of_kernels)
        last_by_first = ((x.ndim - 1,), (0,)), ((), ())
        dot = jax.lax.dot_general
        slopes = dot(of_x, kernels, last_by_first) + dot(x, of_kernels, last_by_first)
        first, *others = (jnp.squeeze(slope, -3) for slope in jnp.split(slopes, 3, axis=-3))
        wide = jnp.broadcast_to(of_bias.astype(widest(bias.dtype, FLOAT32)), first.shape)
        # Not `products`: rematerialisation takes the function with the rule for one operation that is no product.
        return forward(*primals), (first + wide.astype(first.dtype), *others)

    return products(x, kernels, bias)


def _called_with(layers: tuple, x: jax.Array, kernels: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    """Calls copies of three layers with `kernels[:, i]`, and `bias` for the first only.

    The calls are of the layers' own class, so that named scopes, audits and diagnoses find them.
    """
    projections = (changed(layers[0], bias=nnx.Param(bias)), *map(without_bias, layers[1:]))
    return tuple(changed(layer, kernel=nnx.Param(kernels[:, i]))(x) for i, layer in enumerate(projections))


def _products_in_float8(layers: tuple, x: jax.Array, kernels: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    """Calls three layers in float8, otherwise like `_products`.

    The three kernels have one scale, and so have the three gradients, which the backward pass multiplies as one
    operand.
    """
    recipe = layers[0].dot_general.recipe

    def forward(x, kernels, bias):
        return _called_with(tuple(scaled_by_largest_of(layer, weight=kernels) for layer in layers), x, kernels, bias)

    def kept(x, kernels, bias):
        return forward(x, kernels, bias), (x, kernels, bias)

    def backward(residuals, cotangents):
        x, kernels, bias = residuals
        g = jnp.stack(cotangents, axis=-3).reshape(-1, kernels[0].size)
        of_x, of_kernels = x.reshape(g.shape[0], -1), kernels.reshape(kernels.shape[0], -1)
        with scope_of(layers[0]):  # a receipt knows by its path that the product is to be in float8
            # Not of `g`: XLA would write the three gradients next to each other in half precision, for both readings.
            parts = (jax.lax.stop_gradient(cotangent).reshape(g.shape[0], -1) for cotangent in cotangents)
            dx, dw = gradients(of_x, of_kernels, g, recipe, Largest(gradient=largest_of_parts(*parts)))
        dw = jax.lax.optimization_barrier(dw)  # as in `_products`
        wide = cotangents[0].astype(widest(bias.dtype, FLOAT32)).reshape(-1, *bias.shape)
        return dx.reshape(x.shape), dw.reshape(kernels.shape), jnp.sum(wide, axis=0).astype(bias.dtype)

    products = jax.custom_vjp(forward)
    products.defvjp(kept, backward)
    return reverse_mode(products, x, kernels, bias)


_PROMOTION = inspect.signature(nnx.LinearGeneral.__init__).parameters["promote_dtype"].default


def _half_kernel(layer: Any) -> jax.Array:
    """Casts the kernel of a layer to the layer's dtype, in the layer's named scope, which a diagnosis reads."""
    with scope_of(layer):
        return layer.kernel[...].astype(layer.dtype)


def _is_plain(layer: Any) -> bool:
    """True for a `nnx.LinearGeneral`, no subclass, with a bias, as a half-precision policy leaves it, in float8 too.

    False if the user set how it multiplies or promotes, or if the policy also casts its input or output.
    """
    return (
        type(layer) is nnx.LinearGeneral
        and layer.bias is not None
        and layer.dtype in HALF
        and layer.promote_dtype is _PROMOTION
        and (layer.dot_general is None or is_quantised(layer))
        and layer.dot_general_cls is layer.precision is layer.preferred_element_type is None
        and only_sums(layer)
    )


def _kind(layer: Any) -> tuple:
    """The properties in which layers must be equal so that their kernels can be stacked to one operand."""
    kernel, bias = layer.kernel[...], layer.bias[...]
    return layer.dtype, layer.axis, kernel.shape, kernel.dtype, bias.dtype, layer.dot_general
