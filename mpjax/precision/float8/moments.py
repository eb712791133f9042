"""First moments in float8 and second moments in bfloat16, as an optax wrapper: three bytes per parameter, not eight.

Groups of 128 numbers share a scale and an exponent that spreads their range over that of e4m3: Xi et al., "COAT:
Compressing Optimizer states and Activation for Memory-Efficient FP8 Training", 2024 (arXiv:2410.19313), section 4.1.
Unlike in COAT, numbers round stochastically, so that their mean is exact: rounding to nearest would lose changes of
less than half a step. Second moments are not in float8. The squares of a group may differ by more than its range, and
Adam would divide by the root of an underflowed number.

Shapes: N numbers along the last axis of an array, G groups of them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import BFLOAT16, FLOAT32
from mpjax.precision.float8.recipes import E4M3
from mpjax.precision.groups import cut, is_worth_grouping, joined, largest_finite, quotients
from mpjax.precision.moments import MomentFormat, stored_in
from mpjax.precision.stochastic_rounding import scrambled, stochastic_bfloat16


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, UInt


_LARGEST, _LOWEST = 448.0, 2.0**-9
_RANGE = math.log(_LARGEST / _LOWEST)


class Grouped(NamedTuple):
    """A moment in float8. It is sharded like its parameter, because no group spans two rows.

    Attributes:
      values: float8_e4m3fn [..., N], the shape of the moment.
      scale: float32 [..., G], the largest finite absolute value of each group; 1 if that is 0.
      power: float32 [..., G], the exponent, from 1 to 16, to which the quotients of values and `scale` were raised.
    """

    values: jax.Array
    scale: jax.Array
    power: jax.Array


def float8_moments(inner: optax.GradientTransformation, *, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it stores first moments in float8 and second moments in bfloat16 between updates.

    The optimizer itself computes with float32 moments. They are rounded stochastically after each update. First moments
    of fewer than 4,096 numbers, or of fewer than 16 along the last axis, stay float32. Moments in other dtypes, and all
    other state, stay unchanged. Put it inside the loss scaling: a skipped step keeps every bit.

    Args:
      inner: the optimizer (chain).
      seed: the seed of the random numbers, which differ from moment to moment and from update to update.

    Raises:
      UsageError: at `init`, the state of `inner` has no moments (`mu`, `nu`, `nu_max`, `trace`).
    """
    return stored_in(MomentFormat("float8_moments", _stored, _restored, (Grouped,)), inner, seed=seed)


def _stored(moment: jax.Array, seed: jax.Array, second: bool) -> Any:
    if second:
        return stochastic_bfloat16(moment, seed)
    return grouped(moment, seed) if is_worth_grouping(moment) else moment


def _restored(stored: Any, second: bool) -> jax.Array:
    if isinstance(stored, Grouped):
        return ungrouped(stored)
    return stored.astype(FLOAT32) if second and stored.dtype == BFLOAT16 else stored


@functools.partial(jax.jit, inline=True)  # traced once for a shape, and not again for each moment
def grouped(x: Float[Array, "*L N"], seed: UInt[Array, ""]) -> Grouped:
    """Rounds an array stochastically to float8, in groups of 128 numbers along the last axis; the mean is exact.

    A number below the range of its group, less than 1/229,376 (about 2^-18) of the largest, becomes zero or the
    smallest number of the range. inf and NaN become NaN and change no other value.

    Args:
      x: float32.
      seed: uint32, the seed of the random numbers.
    """
    groups = cut(x)
    finite = jnp.isfinite(groups)
    size = jnp.where(finite, jnp.abs(groups), 0)
    largest = largest_finite(groups)
    # In the same pass as the maximum; the smallest quotient would have to wait for the maximum.
    smallest = jnp.min(jnp.where(size > 0, size, jnp.inf), axis=-1, keepdims=True)
    usable = largest > 0
    scale = jnp.where(usable, largest, 1.0)
    size = quotients(size, scale)
    spread = -jnp.log(jnp.maximum(jnp.where(usable, quotients(smallest, scale), 1.0), jnp.finfo(jnp.float32).tiny))
    power = jnp.clip(_RANGE / jnp.maximum(spread, 1e-3), 1.0, 16.0)
    below, above = _neighbours(_LARGEST * size**power)
    back = [(neighbour / _LARGEST) ** (1 / power) for neighbour in (below, above)]
    fraction = (size - back[0]) / jnp.maximum(back[1] - back[0], jnp.finfo(jnp.float32).tiny)
    drawn = (scrambled(groups.shape, seed) >> jnp.uint32(8)).astype(FLOAT32) * jnp.float32(2.0**-24)
    chosen = jnp.where(drawn < fraction, above, below) * jnp.sign(groups)
    values = jnp.where(finite, chosen, jnp.nan).astype(E4M3)
    return Grouped(joined(values, x.shape), scale[..., 0], power[..., 0])


@functools.partial(jax.jit, inline=True)
def ungrouped(stored: Grouped) -> Float[Array, "*L N"]:
    """Decodes a `Grouped` to a float32 array of the original shape; NaN stays NaN."""
    values = cut(stored.values.astype(FLOAT32))
    size = (jnp.abs(values) / _LARGEST) ** (1 / stored.power[..., None]) * stored.scale[..., None]
    return joined(jnp.sign(values) * size, stored.values.shape)


def _neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each number of x, from 0 to 448: the largest e4m3 number that is not above it, and the next e4m3 number.

    The next number of 448, the largest, is 448.
    """
    _, exponent = jnp.frexp(x)
    step = jnp.exp2(jnp.maximum(exponent - 1, -6).astype(FLOAT32) - 3)
    below = jnp.minimum(jnp.floor(x / step) * step, _LARGEST)
    return below, jnp.minimum(below + step, _LARGEST)
