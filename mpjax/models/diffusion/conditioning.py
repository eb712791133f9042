"""What a diffusion network is told beside the noisy images: the time and the label, as one vector that modulates.

Shapes: B batch, D width of the condition, F sines, C channels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import silu
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


SLOWEST = 10_000.0
"""The wavelength of the slowest sine, over 2 pi."""


def sines(times: Int[Array, " B"], features: int) -> Float[Array, "B F"]:
    """Computes cosines, then sines, of the times at `features` / 2 frequencies, in float32 under every policy.

    The frequencies fall from 1 to almost 1 / `SLOWEST` in equal ratios, as in Ho et al., 2020 (arXiv:2006.11239), after
    Vaswani et al., 2017 (arXiv:1706.03762). Half precision would not tell the times above 256 (bfloat16) or their
    phases (float16) apart.
    """
    half = features // 2
    frequencies = np.exp(-math.log(SLOWEST) * np.arange(half) / half).astype(np.float32)
    angles = times.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Condition(nnx.Module):
    """Makes a vector of a time and, if there are classes, of a label: an MLP of the time's sines, and an embedding.

    Args:
      features: the number of sines, an even one.
      width: D.
      num_classes: the number of classes; one more row stands for no label. 0: there are no labels.
    """

    def __init__(self, features: int, width: int, num_classes: int, *, rngs: nnx.Rngs):
        if features % 2:
            raise UsageError(
                f"{features} sines of the time, which are as many as a U-Net's --model.width: wanted an even number, "
                f"half of them cosines; write --model.width {features + 1}"
            )
        normal = nnx.initializers.normal(0.02)
        self.up = nnx.Linear(features, width, kernel_init=normal, rngs=rngs)
        self.down = nnx.Linear(width, width, kernel_init=normal, rngs=rngs)
        self.labels = nnx.Embed(num_classes + 1, width, embedding_init=normal, rngs=rngs) if num_classes else None
        self.features = features

    def __call__(self, times: Int[Array, " B"], labels: Int[Array, " B"] | None) -> Float[Array, "B D"]:
        """Computes SiLU of the vectors, all that layers read of them; the label K stands for none of K classes.

        Raises:
          UsageError: there are labels, and the network has no classes, or the other way round.
        """
        if (labels is None) != (self.labels is None):
            has = "no labels" if labels is None else "labels"
            knows = "no classes" if self.labels is None else f"{self.labels.num_embeddings - 1} classes"
            raise UsageError(f"a diffusion network of {knows} is called with {has}: build it with the data's classes")
        vectors = self.down(silu(self.up(sines(times, self.features))))
        if self.labels is not None and labels is not None:
            vectors = vectors + self.labels(labels)
        return silu(vectors)


def modulated(x: Float[Array, "B *S C"], shift: Float[Array, "B C"], scale: Float[Array, "B C"]):
    """Computes x (1 + scale) + shift for all positions of an example, in float32 (or wider); the dtype is that of x.

    In half precision, 1 + scale would lose a small scale, and the gradients of both would be sums over positions.
    """
    dtype = widest(x.dtype, FLOAT32)
    return (x.astype(dtype) * (1 + _over_positions(scale, x)) + _over_positions(shift, x)).astype(x.dtype)


def gated(x: Float[Array, "B *S C"], gate: Float[Array, "B C"], change: Float[Array, "B *S C"]):
    """Computes x + gate change for all positions of an example, in float32 (or wider); the dtype is that of x."""
    dtype = widest(x.dtype, FLOAT32)
    return (x.astype(dtype) + _over_positions(gate, x) * change.astype(dtype)).astype(x.dtype)


def _over_positions(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Gives vectors [B, C] the axes of x, in float32 or wider, so that their gradients are added up in it."""
    return vector.astype(widest(x.dtype, FLOAT32)).reshape(vector.shape[0], *[1] * (x.ndim - 2), vector.shape[-1])
