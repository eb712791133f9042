"""Rotary position embeddings of patches: half of the pairs of features turn by the row, half by the column.

Siméoni et al., "DINOv3", 2025 (arXiv:2508.10104). As in transformers in evaluation, coordinates are those of the
centres of patches, from -1 to 1 whatever the size of the image, without the shift, jitter and scale of pre-training.

Shapes: B batch, T tokens, H features per head.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models.attention import Attend, attend
from mpjax.models.rotary import Rotation, rotate
from mpjax.precision.dtypes import FLOAT32, widest


def rotating_patches(
    rows: int, columns: int, others: int, *, theta: float, features: int, dtype: np.dtype, attends: Attend = attend
) -> Attend:
    """Makes the function of attention that turns the queries and keys of patches before it calls `attends`.

    Args:
      rows: the rows of patches.
      columns: the columns of patches.
      others: the number of tokens before the patches, which are not turned.
      theta: the base of the frequencies.
      features: H, a multiple of 4.
      dtype: the dtype that the model computes in. Angles are in float32 (or wider) all the same.
    """
    rotation = rotation_of_patches(rows, columns, others, theta=theta, features=features, dtype=dtype)

    @functools.wraps(attends)
    def rotated(query: jax.Array, key: jax.Array, value: jax.Array, **options) -> jax.Array:
        return attends(rotate(query, rotation), rotate(key, rotation), value, **options)

    return rotated


def rotation_of_patches(
    rows: int, columns: int, others: int, *, theta: float, features: int, dtype: np.dtype
) -> Rotation:
    """Computes the cosines and sines [1, T, H / 2] of all tokens; the arguments are those of `rotating_patches`."""
    dtype = widest(dtype, FLOAT32)
    frequencies = jnp.asarray(1 / theta ** np.arange(0, 1, 4 / features), dtype)
    of_rows, of_columns = (_centres(size, dtype)[:, None] * frequencies[None] for size in (rows, columns))
    shape = rows, columns, features // 4
    angles = [jnp.broadcast_to(of_rows[:, None], shape), jnp.broadcast_to(of_columns[None], shape)]
    angles = jnp.concatenate(angles, axis=-1).reshape(1, rows * columns, features // 2)
    angles = jnp.pad(angles, ((0, 0), (others, 0), (0, 0)))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _centres(size: int, dtype: np.dtype) -> jax.Array:
    """The coordinates of the centres of patches, from -1 to 1, times 2 pi."""
    half = jnp.asarray(0.5, dtype)
    return 2 * math.pi * (2 * ((jnp.arange(size, dtype=dtype) + half) / size) - 1)
