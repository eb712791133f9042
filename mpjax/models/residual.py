"""Layers whose result is added to a residual stream, and the statistics of the next norm with it, in one GPU kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from mpjax.precision.calls import scope_of
from mpjax.precision.layers import changed, only_sums


def with_cast_bias(layer: Any) -> Any:
    """Copies a half-precision linear layer with its bias rounded to half precision, by a GPU kernel of its own.

    The layer itself does not change. All other layers are returned as they are.

    XLA would cast the bias again for each row that it is added to. Because of that cost, it would compute the residual
    sum and the statistics of the following norm in two kernels, and the second kernel would read the sum again: in
    float16 behind attention and the MLP, in bfloat16 behind the MLP alone.
    """
    if type(layer) not in (nnx.Linear, nnx.LinearGeneral) or layer.bias is None or not only_sums(layer):
        return layer
    with scope_of(layer):
        return changed(layer, bias=nnx.Param(_cast_apart(layer.dtype, layer.bias[...])))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cast_apart(dtype: Any, x: jax.Array) -> jax.Array:
    """Rounds x to `dtype`, in a GPU kernel of its own, and widens it again. The derivative is 1, in the dtype of x."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


@_cast_apart.defjvp
def _cast_apart_jvp(dtype: Any, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _cast_apart(dtype, *primals), tangents[0]
