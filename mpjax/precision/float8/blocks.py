"""Products of matrices in blocks that share a scale: on a CUDA device by cuDNN, elsewhere multiplied out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.precision.float8.scaling import BLOCK, Quantised


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def multiplied_in_blocks(a: Quantised, b: Quantised, dtype: np.dtype) -> jax.Array:
    """Multiplies two matrices in blocks that are added up over their last axes.

    Args:
      a: `values` [M, K] and `inverse` [M, K / 32].
      b: likewise, [N, K] and [N, K / 32].
      dtype: the dtype of the result.

    Returns:
      [M, N].
    """

    def by_blocks(a: Quantised, b: Quantised) -> jax.Array:
        return multiplied_on_cuda(a, b, dtype)

    def float8_blocks_multiplied_out(a: Quantised, b: Quantised) -> jax.Array:
        x, w = (each.values.astype(dtype) * jnp.repeat(each.inverse.astype(dtype), BLOCK, 1) for each in (a, b))
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    return lax.platform_dependent(a, b, cuda=by_blocks, default=jax.jit(float8_blocks_multiplied_out))


def multiplied_on_cuda(a: Quantised, b: Quantised, dtype: np.dtype) -> jax.Array:
    """Multiplies as `multiplied_in_blocks` does, but on a CUDA device alone."""
    a, b = (Quantised(each.values[None], each.inverse.astype(jnp.float8_e8m0fnu)[None]) for each in (a, b))
    return _each(dtype)(a, b)[0]


def _each(dtype: np.dtype):
    """Returns a function that multiplies each matrix of [B, M, K] by one of [B, N, K], with a rule for `jax.vmap`.

    Without it, `jax.nn.scaled_matmul` fails unless all of its operands have a batch axis.
    """

    @jax.custom_batching.custom_vmap
    def each(a: Quantised, b: Quantised) -> Float[Array, "B M N"]:
        return jax.nn.scaled_matmul(a.values, b.values, a.inverse, b.inverse, preferred_element_type=dtype)

    @each.def_vmap
    def over_a_batch(size: int, batched: Sequence[Quantised], a: Quantised, b: Quantised):
        in_a, in_b = (any(flags) for flags in batched)
        if in_a and in_b:
            a, b = (_with_batch(x, flags, size) for x, flags in ((a, batched[0]), (b, batched[1])))
            y = each(*(Quantised(*(z.reshape(-1, *z.shape[2:]) for z in x)) for x in (a, b)))
            return y.reshape(size, -1, *y.shape[1:]), True
        # Rows of a batch are further rows, so that the other operand is read once.
        if in_a:
            y = each(_as_rows(_with_batch(a, batched[0], size)), b)
            return jnp.moveaxis(y.reshape(y.shape[0], size, -1, y.shape[2]), 1, 0), True
        y = each(a, _as_rows(_with_batch(b, batched[1], size)))
        return jnp.moveaxis(y.reshape(*y.shape[:2], size, -1), 2, 0), True

    return each


def _with_batch(x: Quantised, batched: Quantised, size: int) -> Quantised:
    """Returns `x` with a leading batch axis for its values and for its scales."""
    return Quantised(*(z if has else jnp.broadcast_to(z, (size, *z.shape)) for z, has in zip(x, batched, strict=True)))


def _as_rows(x: Quantised) -> Quantised:
    """Returns [B, size * M, K] of [size, B, M, K]."""
    return Quantised(*(jnp.moveaxis(z, 0, 1).reshape(z.shape[1], -1, z.shape[3]) for z in x))
