"""Groups of 128 numbers along the last axis of an array, which share a scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Shaped


GROUP = 128
"""The number of values along the last axis that share a scale, as in COAT (Xi et al., 2024, arXiv:2410.19313)."""

SMALLEST = 4096
"""The size of the smallest array that is stored in groups, as in bitsandbytes' 8-bit optimizers."""

SHORTEST = 16
"""The shortest last axis of an array that is stored in groups: each group has a scale or two of its own."""


def is_worth_grouping(x: jax.Array) -> bool:
    """True for an array of at least 4,096 numbers, of which at least 16 are along the last axis."""
    return x.ndim > 0 and math.prod(x.shape) >= SMALLEST and x.shape[-1] >= SHORTEST


def cut(x: Shaped[Array, "*L N"]) -> Shaped[Array, "*L G W"]:
    """Cuts the last axis into groups of 128 numbers, the last padded with zeros; if N <= 128, into one of N."""
    width = min(x.shape[-1], GROUP)
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)])
    return filled.reshape(*x.shape[:-1], -1, width)


def joined(groups: Shaped[Array, "*L G W"], shape: tuple[int, ...]) -> Shaped[Array, "*L N"]:
    """Joins groups to an array of `shape`, and drops the padding."""
    return groups.reshape(*shape[:-1], -1)[..., : shape[-1]]


def largest_finite(groups: Float[Array, "*L G W"]) -> Float[Array, "*L G 1"]:
    """The largest finite absolute value of each group."""
    return jnp.max(jnp.where(jnp.isfinite(groups), jnp.abs(groups), 0), axis=-1, keepdims=True)


def quotients(size: Float[Array, "*L G W"], scale: Float[Array, "*L G 1"]) -> Float[Array, "*L G W"]:
    """Divides absolute values by the scale of their group.

    XLA may multiply by 1 / scale, which is subnormal from 2^126 on: devices flush it to zero.
    """
    middle = jnp.where(scale > 1, 2.0**-64, 2.0**64)
    return (size * middle) / (scale * middle)
