"""Rotary position embeddings: pairs of features are turned by angles that grow with the position.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864), section 3.2.2. As
in the files of Hugging Face transformers, features i and i + H/2 are a pair.

Shapes: B batch (1 for the same positions in all texts), T positions, N heads, H features per head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divides all frequencies by `factor` (Chen et al., "Position Interpolation", 2023, arXiv:2306.15595)."""

    factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        """Computes the changed frequencies, [H / 2], and the number that multiplies all cosines and sines."""
        del theta
        return frequencies / self.factor, 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divides the low frequencies by `factor`, keeps the high ones, and changes linearly between the two.

    Source: "The Llama 3 Herd of Models", 2024 (arXiv:2407.21783), and `apply_scaling` in Meta's code of Llama 3.1.

    Attributes:
      factor: the divisor of low frequencies.
      low: frequencies of at most this many turns within `length` positions are divided by `factor`.
      high: frequencies of at least this many turns within `length` positions are kept.
      length: the number of positions that the model was trained on before it was scaled.
    """

    factor: float
    low: float
    high: float
    length: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        """Computes the changed frequencies, [H / 2], and the number that multiplies all cosines and sines."""
        del theta
        turns = self.length * frequencies / (2 * math.pi)
        ramp = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (ramp + (1 - ramp) / self.factor), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Divides the low frequencies by `factor`, keeps the high ones, with a linear transition over the features between.

    It also multiplies cosines and sines by a factor, which sharpens attention.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023 (arXiv:2309.00071).

    Attributes:
      factor: the divisor of low frequencies.
      low: frequencies of at most this many turns within `length` positions are divided by `factor`.
      high: frequencies of at least this many turns within `length` positions are kept.
      length: the number of positions that the model was trained on before it was scaled.
      attention_factor: the factor of cosines and sines; None: 0.1 log(factor) + 1, but 1 if `factor` is at most 1.
      truncate: whether the bounds of the transition are rounded outwards to whole feature indices.
    """

    factor: float
    low: float = 1.0
    high: float = 32.0
    length: int
    attention_factor: float | None = None
    truncate: bool = True

    def __call__(self, frequencies: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        """Computes the changed frequencies, [H / 2], and the number that multiplies all cosines and sines."""
        half = len(frequencies)

        def feature(turns: float) -> float:
            return half * math.log(self.length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = feature(self.high), feature(self.low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        ramp = np.clip((np.arange(half) - first) / max(last - first, 0.001), 0, 1)
        attention = self.attention_factor
        if attention is None:
            attention = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return frequencies * (1 - ramp + ramp / self.factor), attention


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The angles of rotary position embeddings.

    Attributes:
      theta: the base of the frequencies: pair i of H/2 turns by theta ** (-2 i / H) radians from position to position.
      scaling: a change of the frequencies for longer texts; None for none.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None

    def frequencies(self, features: int) -> tuple[np.ndarray, float]:
        """Computes the radians per position of each pair of features, float64 [H / 2], for H = `features`.

        The second result is the number that multiplies all cosines and sines, 1 without `scaling`.
        """
        plain = self.theta ** (-np.arange(0, features, 2, dtype=np.float64) / features)
        return (plain, 1.0) if self.scaling is None else self.scaling(plain, self.theta)


class Rotation(NamedTuple):
    """The cosines and sines of the angles of each position and pair of features, float32 (or wider) [B, T, H / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotation(rope: Rope | None, positions: Int[Array, "B T"], features: int, dtype: np.dtype) -> Rotation:
    """Computes the cosines and sines for positions; without `rope`, those of the angle 0.

    Args:
      rope: the angles; None for layers without position embeddings.
      positions: int32, counted from 0.
      features: H, the number of features of a head.
      dtype: the dtype that the model computes in. Angles are in float32 (or wider) all the same: in bfloat16, position
        257 would be position 256.
    """
    dtype = widest(dtype, FLOAT32)
    if rope is None:
        shape = *positions.shape, features // 2
        return Rotation(jnp.ones(shape, dtype), jnp.zeros(shape, dtype))
    frequencies, factor = rope.frequencies(features)
    angles = positions.astype(dtype)[..., None] * jnp.asarray(frequencies, dtype)[None, None, :]
    factor = jnp.asarray(factor, dtype)
    return Rotation(factor * jnp.cos(angles), factor * jnp.sin(angles))


def rotate(x: Float[Array, "B T N H"], by: Rotation) -> Float[Array, "B T N H"]:
    """Rotates each pair of features, i and i + H/2, by the angle of its position, and returns it in the dtype of x.

    It computes in the dtype of the rotation, float32 or wider.
    """
    cos, sin = (table[:, :, None, :] for table in by)
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
