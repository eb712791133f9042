"""Flax layers whose gradients add up over a whole batch in half precision: they get to add up in float32.

The gradient of a bias is a sum over all examples and positions, that of an embedding one over all places where a token
stands. Flax casts both parameters down before they are spread out, so that the sums are taken in half precision: of
147,456 pixels in float16 two thirds can get lost. Cast after that, the results are the same bit for bit, and the sums
are taken in float32, as PyTorch takes them.
"""

import functools

import jax.numpy as jnp

from mpjax.precision.calls import with_call
from mpjax.precision.dtypes import FLOAT32, widest


@functools.cache
def summing_in_float32(cls: type) -> type:
    """`cls`, one of Flax's own layers, with such sums in float32; `cls` itself if it has none, or is the user's."""
    from flax import nnx

    if cls in (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose):
        return with_call(cls, _with_bias_after, _mpjax_plain_class=cls)
    if cls is nnx.Embed:
        return with_call(cls, _with_cast_after, _mpjax_plain_class=cls)
    return cls


def _with_bias_after(call, self, *args, **kwargs):
    if self.bias is None:
        return call(self, *args, **kwargs)
    y = call(_changed(self, bias=None, use_bias=False), *args, **kwargs)
    bias = self.bias[...]
    if y.shape[y.ndim - bias.ndim :] != bias.shape:  # a LinearGeneral with a bias for each place in its batch axes
        return call(self, *args, **kwargs)
    bias = jnp.broadcast_to(bias.astype(widest(bias.dtype, FLOAT32)), y.shape)
    return y + bias.astype(y.dtype)


def _with_cast_after(call, self, *args, **kwargs):
    table = self.embedding[...]
    found = call(_changed(self, dtype=widest(table.dtype, FLOAT32)), *args, **kwargs)
    return found.astype(self.dtype)


def _changed(module, **attributes):
    """A module that is another but for some attributes, for the time of a call."""
    changed = object.__new__(type(module))
    vars(changed).update(vars(module), **attributes)
    return changed
