"""Flax layers that carry arrays from call to call, which keep one dtype: recurrent cells, and attention's cache."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from mpjax.precision.calls import unwrap, wrap
from mpjax.precision.dtypes import is_floating


def keep_carried(module, dtype: np.dtype) -> None:
    """Lets a layer that computes in `dtype` carry on what it can read again, in place."""
    from flax import nnx

    for kind in (KeepsCarry, CachesIn):
        unwrap(module, kind)
    if isinstance(module, nnx.RNNCellBase):
        wrap(module, KeepsCarry())
    if isinstance(module, nnx.MultiHeadAttention):
        wrap(module, CachesIn(np.dtype(dtype)))
        cast_cache(module, np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class KeepsCarry:
    """A wrapper for a recurrent cell, `(carry, inputs) -> (carry, outputs)`: the new carry has the old one's dtypes."""

    depth: ClassVar[int] = 2

    def __call__(self, call, module, carry, *args, **kwargs):
        """Calls a cell."""
        new, outputs = call(module, carry, *args, **kwargs)
        return jax.tree.map(lambda a, b: a.astype(b.dtype) if is_floating(a) else a, new, carry), outputs


@dataclasses.dataclass(frozen=True)
class CachesIn:
    """A wrapper for attention that decodes: keys and values of earlier tokens are in the dtype of the next ones.

    `init_cache` makes them float32, whenever it is called.
    """

    dtype: np.dtype
    depth: ClassVar[int] = 4

    def __call__(self, call, module, *args, **kwargs):
        """Calls attention."""
        cast_cache(module, self.dtype)
        return call(module, *args, **kwargs)


def cast_cache(module, dtype: np.dtype) -> None:
    """Casts the keys and values that attention has cached, if it has, in place."""
    for name in ("cached_key", "cached_value"):
        variable = getattr(module, name, None)
        if variable is None or variable.get_value().dtype == dtype:
            continue
        value = variable.get_value()
        abstract = isinstance(value, jax.ShapeDtypeStruct)
        variable.set_value(jax.ShapeDtypeStruct(value.shape, dtype) if abstract else value.astype(dtype))
