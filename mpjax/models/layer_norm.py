"""Layer norm and the residual connection around it, with a backward pass that is one kernel on NVIDIA GPUs.

Shapes: ... stands for the axes of examples and positions; D width, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.kernel_calls import kernel_call
from mpjax.precision.calls import Scope, scope_of, wrappers_of
from mpjax.precision.dtypes import FLOAT32, HALF
from mpjax.precision.layers import Casts, changed
from mpjax.precision.reduction import varying


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def pre_norm(x: jax.Array, norm: Any, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Computes x + change(norm(x)), like `mpjax.models.transformer.pre_norm` bit for bit.

    On NVIDIA GPUs, one kernel computes the gradient of x and those of the norm's scale and bias. The gradient of x has
    a term of norm(x), and one of the residual connection: they are added in float32 and rounded once. A norm that does
    not compute in float32 has Flax's derivative.
    """
    y, x = _normalized(norm, x) if computes_in_float32(norm, x.dtype) else (norm(x), x)
    return x + change(y)


def computes_in_float32(norm: Any, dtype: jax.typing.DTypeLike) -> bool:
    """True if an `nnx.LayerNorm` takes values of `dtype`, float32 or half precision, and computes in float32 alone.

    Its scale and bias, which may be abstract, are stored in float32 too.
    """
    wrappers = [wrapper for wrapper in wrappers_of(norm) if type(wrapper) is not Scope]
    computed = [norm.dtype, *(wrapper.inside for wrapper in wrappers if isinstance(wrapper, Casts))]
    return (
        jnp.dtype(dtype) in (FLOAT32, *HALF)
        and all(isinstance(wrapper, Casts) for wrapper in wrappers)
        and all(jnp.dtype(other) == FLOAT32 for other in computed if other is not None)
        and {variable.get_value().dtype for variable in (norm.scale, norm.bias)} == {FLOAT32}
    )


def _normalized(norm: Any, x: Float[Array, "*S D"]) -> tuple[jax.Array, jax.Array]:
    """Computes norm(x) and x, so that the backward pass is given both terms of the gradient of x."""

    def plain(x, scale, bias):
        return changed(norm, scale=nnx.Param(scale), bias=nnx.Param(bias))(x), x

    def forward(x, scale, bias):
        with scope_of(norm):
            statistics = _statistics(x)
        return plain(x, scale, bias), (x, scale, *statistics)

    def pulled_back(residuals, cotangents):
        (x, scale, mean, variance), (dy, dskip) = residuals, cotangents
        rows = (array.reshape(-1, x.shape[-1]) for array in (x, dy, dskip))
        with scope_of(norm):
            statistics = mean.reshape(-1), variance.reshape(-1)
            dx, dscale, dbias = kernel_call(backward, _by_kernel, *rows, scale, *statistics, epsilon=norm.epsilon)
        return dx.reshape(x.shape), dscale, dbias

    normalized = jax.custom_vjp(plain)
    normalized.defvjp(forward, pulled_back)
    # A derivative of one's own has the type of its argument: JAX adds up what devices have if it differs between them.
    vectors = (norm.scale[...], norm.bias[...])
    return normalized(x, *(jax.lax.pcast(v, tuple(varying(x) - varying(v)), to="varying") for v in vectors))


def _statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes mean and variance over the last axis by Flax's operations, so that XLA computes them once for both."""
    wide = x.astype(FLOAT32)
    mean = jnp.mean(wide, axis=-1)
    return mean, jnp.maximum(0.0, jnp.mean(jnp.square(wide), axis=-1) - jnp.square(mean))


def _by_kernel(*arrays: jax.Array, epsilon: float) -> list[jax.Array]:
    from mpjax.models import layer_norm_kernel  # local, because only programs for a GPU need Pallas

    return layer_norm_kernel.backward(*arrays, epsilon=epsilon)


def backward(
    x: Float[Array, "N D"],
    dy: Float[Array, "N D"],
    dskip: Float[Array, "N D"],
    scale: Float[Array, " D"],
    mean: Float[Array, " N"],
    variance: Float[Array, " N"],
    *,
    epsilon: float,
) -> list[jax.Array]:
    """Computes the gradients of x, scale and bias from those of norm(x) and of x itself, in float32.

    Args:
      x: the input of the norm, in float32 or half precision.
      dy: the gradient of norm(x).
      dskip: the gradient of x over the residual connection.
      scale: the norm's factors, float32.
      mean: the mean of each row, float32.
      variance: the variance of each row, float32. Where it is 0, its derivative is 0.
      epsilon: epsilon of the norm.

    Returns:
      The gradient of x [N, D] in the dtype of x, and those of scale and bias [D] in float32.
    """
    inverse = jax.lax.rsqrt(variance + epsilon)[:, None]
    normalized = (x.astype(FLOAT32) - mean[:, None]) * inverse
    dy = dy.astype(FLOAT32)
    slope = dy * scale[None, :]
    along = jnp.mean(slope * normalized, axis=1, keepdims=True)
    along = jnp.where((variance == 0)[:, None], 0.0, along)
    dx = (slope - jnp.mean(slope, axis=1, keepdims=True) - normalized * along) * inverse + dskip.astype(FLOAT32)
    return [dx.astype(x.dtype), jnp.sum(dy * normalized, axis=0), jnp.sum(dy, axis=0)]
