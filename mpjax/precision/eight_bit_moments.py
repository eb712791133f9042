"""First and second moments in 8 bits, as an optax wrapper: two bytes per parameter, not eight.

Groups of 128 numbers share a scale, their largest value. Quotients of it are stored as codes of a table of 128 or 255
values from 0 to 1. The dynamic table has seven decades, each with twice as many values as the one below: Dettmers et
al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv:2110.02861), section 2.2. The linear one has equal
steps. Unlike in that paper, numbers round stochastically, so that their mean is exact: rounding to nearest would lose
changes of less than half a step.

Shapes: N numbers along the last axis of an array, G groups of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.groups import cut, is_worth_grouping, joined, largest_finite, quotients
from mpjax.precision.moments import MomentFormat, stored_in
from mpjax.precision.stochastic_rounding import scrambled


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, UInt


class DynamicCodes(NamedTuple):
    """A moment as codes of the dynamic tables. It is sharded like its parameter, because no group spans two rows.

    Attributes:
      dynamic_codes: int8 [..., N], the shape of the moment: the sign times the place in the table, -128 for NaN; or,
        for a second moment, uint8: the place in the table, 255 for NaN.
      group_scale: float32 [..., G], the largest finite absolute value of each group.
    """

    dynamic_codes: jax.Array
    group_scale: jax.Array


class LinearCodes(NamedTuple):
    """A moment as codes of the linear tables; see `DynamicCodes`."""

    linear_codes: jax.Array
    group_scale: jax.Array


Codes = DynamicCodes | LinearCodes
Quantisation = Literal["dynamic", "linear"]
_CODES: dict[Quantisation, type[DynamicCodes] | type[LinearCodes]] = {"dynamic": DynamicCodes, "linear": LinearCodes}


def int8_moments(
    inner: optax.GradientTransformation, *, quantisation: Quantisation = "dynamic", seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it stores its moments in 8 bits between updates.

    The optimizer itself computes with float32 moments. They are rounded stochastically after each update, but a second
    moment that is not zero is never stored as zero, since Adam divides by its root: it is stored as at least 3.3e-7
    ("dynamic") or 1/254 ("linear") of the largest of its group. So steps of the smallest gradients of a group are
    shorter than with float32 moments, with "linear" much shorter. Moments of fewer than 4,096 numbers, or of fewer
    than 16 along the last axis, stay float32. Moments in other dtypes, and all other state, stay unchanged. Put it
    inside the loss scaling: a skipped step keeps every bit.

    Args:
      inner: the optimizer (chain).
      quantisation: "dynamic", or "linear" for equal steps between the values of a group.
      seed: the seed of the random numbers, which differ from moment to moment and from update to update.

    Raises:
      UsageError: at `init`, the state of `inner` has no moments (`mu`, `nu`, `nu_max`, `trace`), or is that of a
        centered RMSProp.
    """

    def store(moment: jax.Array, seed: jax.Array, second: bool) -> Any:
        codes = np.dtype(np.uint8 if second else np.int8)
        return encoded(moment, seed, codes, quantisation) if is_worth_grouping(moment) else moment

    def restore(stored: Any, second: bool) -> jax.Array:
        return decoded(stored) if isinstance(stored, (DynamicCodes, LinearCodes)) else stored

    return stored_in(MomentFormat("int8_moments", store, restore, tuple(_CODES.values())), inner, seed=seed)


# Traced once for a shape, and not again for each moment.
@functools.partial(jax.jit, static_argnames=("dtype", "quantisation"), inline=True)
def encoded(x: Float[Array, "*L N"], seed: UInt[Array, ""], dtype: np.dtype, quantisation: Quantisation) -> Codes:
    """Rounds an array stochastically to codes, in groups of 128 numbers along the last axis.

    inf and NaN become NaN and change no other value. With uint8 codes, a number above zero keeps a code above zero;
    otherwise the mean is exact.

    Args:
      x: float32; at least 0 if codes are uint8.
      seed: uint32, the seed of the random numbers.
      dtype: int8, or uint8 for numbers that are never negative.
      quantisation: "dynamic" or "linear".
    """
    values = jnp.asarray(table(dtype, quantisation))
    groups = cut(x)
    finite = jnp.isfinite(groups)
    scale = largest_finite(groups)
    size = quotients(jnp.where(finite, jnp.abs(groups), 0), jnp.where(scale > 0, scale, 1.0))
    below = jnp.searchsorted(values, size, side="right", method="scan_unrolled") - 1
    below = jnp.clip(below, 0, len(values) - 2)
    low, high = values[below], values[below + 1]
    drawn = (scrambled(groups.shape, seed) >> jnp.uint32(8)).astype(FLOAT32) * jnp.float32(2.0**-24)
    place = jnp.where(drawn < (size - low) / (high - low), below + 1, below)
    if dtype == np.uint8:
        place = jnp.where(size > 0, jnp.maximum(place, 1), place)
    signed = place if dtype == np.uint8 else jnp.where(groups < 0, -place, place)
    codes = jnp.where(finite, signed, _not_a_number(dtype)).astype(dtype)
    return _CODES[quantisation](joined(codes, x.shape), scale[..., 0])


@functools.partial(jax.jit, inline=True)
def decoded(stored: Codes) -> Float[Array, "*L N"]:
    """Decodes to a float32 array of the original shape; NaN stays NaN."""
    codes, scale = stored
    values = jnp.asarray(table(codes.dtype, "dynamic" if isinstance(stored, DynamicCodes) else "linear"))
    groups = cut(codes).astype(jnp.int32)
    numbers = (
        jnp.sign(groups).astype(FLOAT32) * values[jnp.minimum(jnp.abs(groups), len(values) - 1)] * scale[..., None]
    )
    return joined(jnp.where(groups == _not_a_number(codes.dtype), jnp.nan, numbers), codes.shape)


@functools.cache
def table(dtype: np.dtype, quantisation: Quantisation) -> np.ndarray:
    """The float32 values of the codes from 0 on, in order from 0 to 1: 128 for int8, 255 for uint8.

    The dynamic table has, of each decade, the middles of 2^i (int8) or 2^(i+1) (uint8) equal parts, i from 0 to 6. The
    last is replaced by 1, so that every quotient lies between two values.
    """
    if quantisation == "linear":
        return np.linspace(0, 1, 255 if dtype == np.uint8 else 128, dtype=np.float32)
    more = int(dtype == np.uint8)
    edges = [(10.0 ** (i - 6), np.linspace(0.1, 1, 2 ** (i + more) + 1)) for i in range(7)]
    middles = np.concatenate([decade * (parts[:-1] + parts[1:]) / 2 for decade, parts in edges])
    return np.concatenate([[0.0], middles[:-1], [1.0]]).astype(np.float32)


def _not_a_number(dtype: np.dtype) -> int:
    """The code that no value has."""
    return 255 if dtype == np.uint8 else -128
