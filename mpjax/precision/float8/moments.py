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
from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import BFLOAT16, FLOAT32, in_float32
from mpjax.precision.float8.recipes import E4M3
from mpjax.precision.moments import SECOND, is_moment, paths_of, require_moments
from mpjax.precision.optimizer_state import init_in_float32, parameters_seen
from mpjax.precision.stochastic_rounding import scrambled, seed_of, stochastic_bfloat16


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, UInt


GROUP = 128
"""The number of values along the last axis that share a scale, as in COAT."""

SMALLEST = 4096
"""The size of the smallest array in float8, as in bitsandbytes' 8-bit optimizers; smaller arrays stay float32."""

SHORTEST = 16
"""The shortest last axis of an array in float8: each group takes 8 more bytes."""

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


class Float8MomentsState(NamedTuple):
    """The state of `float8_moments`.

    Attributes:
      inner_state: the wrapped optimizer's state, with a `Grouped` in place of each large first moment, and the second
        moments in bfloat16.
      draws: int32, the number of updates so far, a seed of the rounding.
    """

    inner_state: Any
    draws: jax.Array


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
    inner = optax.with_extra_args_support(inner)

    def stored(state, draws: jax.Array, parameters: Set[tuple]):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        kept = [
            _stored(path, parameters, leaf, seed_of(seed, draws, number)) for number, (path, leaf) in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, kept)

    def init(params) -> Float8MomentsState:
        state = init_in_float32(inner, params)
        require_moments(state, params, "float8_moments")
        draws = jnp.zeros((), jnp.int32)
        return Float8MomentsState(stored(state, draws, paths_of(params)), draws)

    def update(updates, state, params=None, **extra):
        parameters = paths_of(updates)
        restored = functools.partial(_restored, parameters)
        float32_state = jax.tree_util.tree_map_with_path(restored, state.inner_state, is_leaf=_is_grouped)
        updates, new = inner.update(in_float32(updates), float32_state, parameters_seen(inner, params), **extra)
        return updates, Float8MomentsState(stored(new, state.draws + 1, parameters), state.draws + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _stored(path: tuple, parameters: Set[tuple], leaf: Any, seed: jax.Array) -> Any:
    if not is_moment(path, parameters) or leaf.dtype != FLOAT32:
        return leaf
    if is_moment(path, parameters, SECOND):
        return stochastic_bfloat16(leaf, seed)
    large = leaf.ndim > 0 and math.prod(leaf.shape) >= SMALLEST and leaf.shape[-1] >= SHORTEST
    return grouped(leaf, seed) if large else leaf


def _restored(parameters: Set[tuple], path: tuple, leaf: Any) -> Any:
    if _is_grouped(leaf):
        return ungrouped(leaf)
    return leaf.astype(FLOAT32) if is_moment(path, parameters, SECOND) and leaf.dtype == BFLOAT16 else leaf


def _is_grouped(node: Any) -> bool:
    return isinstance(node, Grouped)


@functools.partial(jax.jit, inline=True)  # traced once for a shape, and not again for each moment
def grouped(x: Float[Array, "*L N"], seed: UInt[Array, ""]) -> Grouped:
    """Rounds an array stochastically to float8, in groups of 128 numbers along the last axis; the mean is exact.

    A number below the range of its group, less than 1/229,376 (about 2^-18) of the largest, becomes zero or the
    smallest number of the range. inf and NaN become NaN and change no other value.

    Args:
      x: float32.
      seed: uint32, the seed of the random numbers.
    """
    groups = _cut(x)
    finite = jnp.isfinite(groups)
    size = jnp.where(finite, jnp.abs(groups), 0)
    largest = jnp.max(size, axis=-1, keepdims=True)
    # In the same pass as the maximum; the smallest quotient would have to wait for the maximum.
    smallest = jnp.min(jnp.where(size > 0, size, jnp.inf), axis=-1, keepdims=True)
    usable = largest > 0
    scale = jnp.where(usable, largest, 1.0)
    # XLA may multiply by 1 / scale, which is subnormal from 2^126 on: devices flush it to zero.
    middle = jnp.where(scale > 1, 2.0**-64, 2.0**64)
    size = (size * middle) / (scale * middle)
    smallest = jnp.where(usable, (smallest * middle) / (scale * middle), 1.0)
    spread = -jnp.log(jnp.maximum(smallest, jnp.finfo(jnp.float32).tiny))
    power = jnp.clip(_RANGE / jnp.maximum(spread, 1e-3), 1.0, 16.0)
    below, above = _neighbours(_LARGEST * size**power)
    back = [(neighbour / _LARGEST) ** (1 / power) for neighbour in (below, above)]
    fraction = (size - back[0]) / jnp.maximum(back[1] - back[0], jnp.finfo(jnp.float32).tiny)
    drawn = (scrambled(groups.shape, seed) >> jnp.uint32(8)).astype(FLOAT32) * jnp.float32(2.0**-24)
    chosen = jnp.where(drawn < fraction, above, below) * jnp.sign(groups)
    values = jnp.where(finite, chosen, jnp.nan).astype(E4M3)
    return Grouped(_joined(values, x.shape), scale[..., 0], power[..., 0])


@functools.partial(jax.jit, inline=True)
def ungrouped(stored: Grouped) -> Float[Array, "*L N"]:
    """Decodes a `Grouped` to a float32 array of the original shape; NaN stays NaN."""
    values = _cut(stored.values.astype(FLOAT32))
    size = (jnp.abs(values) / _LARGEST) ** (1 / stored.power[..., None]) * stored.scale[..., None]
    return _joined(jnp.sign(values) * size, stored.values.shape)


def _cut(x: jax.Array) -> jax.Array:
    """Reshapes an array [..., N] to groups [..., G, 128], the last padded with zeros; if N <= 128, to [..., 1, N]."""
    width = min(x.shape[-1], GROUP)
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)])
    return filled.reshape(*x.shape[:-1], -1, width)


def _joined(groups: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return groups.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each number of x, from 0 to 448: the largest e4m3 number that is not above it, and the next e4m3 number.

    The next number of 448, the largest, is 448.
    """
    _, exponent = jnp.frexp(x)
    step = jnp.exp2(jnp.maximum(exponent - 1, -6).astype(FLOAT32) - 3)
    below = jnp.minimum(jnp.floor(x / step) * step, _LARGEST)
    return below, jnp.minimum(below + step, _LARGEST)
