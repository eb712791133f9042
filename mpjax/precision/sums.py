"""Flax layers whose gradients add up over a whole batch in half precision: they get to add up in float32.

The gradient of a bias is a sum over all examples and positions, that of an embedding one over all places where a token
stands. Flax casts both parameters down before they are spread out, so that the sums are taken in half precision: of
147,456 pixels in float16 two thirds can get lost. Cast after that, the results are the same bit for bit, and the sums
are taken in float32, as PyTorch takes them.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32, widest


def adds_up(module) -> bool:
    """Whether `module` is one of Flax's own layers with such sums; what the user derived from them may do otherwise."""
    from flax import nnx

    return type(module) in (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose, nnx.Embed)


@dataclasses.dataclass(frozen=True)
class SumsInFloat32:
    """A wrapper for a layer that `adds_up`: results are those of Flax bit for bit, sums are in float32 (or wider)."""

    depth: ClassVar[int] = 4

    def __call__(self, call, module, *args, **kwargs):
        """Calls a layer with its parameters cast after they are spread out."""
        if hasattr(module, "embedding"):
            return _with_cast_after(call, module, *args, **kwargs)
        return call(module, *args, **kwargs) if module.bias is None else _with_bias_after(call, module, *args, **kwargs)


def _with_bias_after(call, module, inputs, *args, **kwargs):
    y = call(_changed(module, bias=None, use_bias=False), inputs, *args, **kwargs)
    bias = module.bias[...]
    bias = bias.astype(widest(bias.dtype, FLOAT32)).reshape(_bias_shape(module, inputs))
    return y + jnp.broadcast_to(bias, y.shape).astype(module.dtype).astype(y.dtype)


def _bias_shape(module, inputs) -> tuple[int, ...]:
    """The shape in which a bias is added: along the last axes, and along the batch axes of a `LinearGeneral`."""
    batch_axes = {axis % inputs.ndim for axis in getattr(module, "batch_axis", ())}
    if not batch_axes:
        return module.bias.shape
    contracted = {axis % inputs.ndim for axis in _tuple(module.axis)}
    kept = (axis for axis in range(inputs.ndim) if axis not in contracted)
    return (*(inputs.shape[axis] if axis in batch_axes else 1 for axis in kept), *_tuple(module.out_features))


def _tuple(value) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _with_cast_after(call, module, *args, **kwargs):
    table = module.embedding[...]
    found = call(_changed(module, dtype=widest(table.dtype, FLOAT32)), *args, **kwargs)
    return found.astype(module.dtype)


def _changed(module, **attributes):
    """A module that is another but for some attributes, for the time of a call."""
    changed = object.__new__(type(module))
    vars(changed).update(vars(module), **attributes)
    return changed
