"""Diffusion Transformer: a Vision Transformer over the patches of a noisy image, modulated by its time and label.

Peebles & Xie, "Scalable Diffusion Models with Transformers", 2023 (arXiv:2212.09748), with adaLN-Zero. Unlike theirs,
it predicts no variance, so it has as many outputs as the image has channels.

Shapes: B batch, H height, W width, C channels, T patches, D width of the network, P side of a patch.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import tanh_gelu
from mpjax.models.attention import Attention, Implementation
from mpjax.models.diffusion.conditioning import SLOWEST, Condition, gated, modulated
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import MLP, with_positions
from mpjax.models.vit import require_patches


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


SINES = 256
"""Sines of the time."""

UNIFORM = nnx.initializers.xavier_uniform()
ZEROS = nnx.initializers.zeros


def _of_projections(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Draws the kernel of queries, keys or values, [D, D], as Xavier's a third of one kernel [D, 3 D]."""
    return nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")(key, shape, dtype)


def _of_patches(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Draws the kernel [P, P, C, D] of the patch embedding as Xavier's of a linear layer [P P C, D]."""
    return UNIFORM(key, (math.prod(shape[:-1]), shape[-1]), dtype).reshape(shape)


class ModulatedBlock(nnx.Module):
    """Attention and an MLP behind layer norms without parameters, each shifted, scaled and gated by the condition.

    The gates are zero at first, so that the block is the identity (adaLN-Zero).
    """

    def __init__(self, width: int, heads: int, *, implementation: Implementation = "auto", rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, width, epsilon=1e-6, use_scale=False, use_bias=False, rngs=rngs)
        self.norm1 = norm()
        self.attention = Attention(
            width, heads, implementation=implementation, kernel_init=_of_projections, out_init=UNIFORM, rngs=rngs
        )
        self.norm2 = norm()
        self.mlp = MLP(width, 4 * width, tanh_gelu, kernel_init=UNIFORM, out_init=UNIFORM, rngs=rngs)
        self.modulation = nnx.Linear(width, 6 * width, kernel_init=ZEROS, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], condition: Float[Array, "B D"]) -> Float[Array, "B T D"]:
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(self.modulation(condition), 6, axis=-1)
        x = gated(x, gate1, self.attention(modulated(self.norm1(x), shift1, scale1)))
        return gated(x, gate2, self.mlp(modulated(self.norm2(x), shift2, scale2)))


class DiT(nnx.Module):
    """Patch embedding, fixed positions, modulated blocks, and a modulated norm before a linear layer to pixels.

    Args:
      image_shape: height, width and channels of an image.
      num_classes: the number of classes; 0: no labels.
      patch: height and width of a patch in pixels.
      width: D, a multiple of 4.
      depth: number of blocks.
      heads: number of attention heads, a divisor of the width.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Raises:
      UsageError: the patch does not divide height and width, or 4 does not divide the width.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
        patch: int = 2,
        width: int,
        depth: int,
        heads: int,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
    ):
        rows, columns, channels = image_shape
        require_patches(rows, columns, patch)
        if width % 4:
            raise UsageError(
                f"a DiT of width {width} has no positions: their sines and cosines of rows and columns want a multiple "
                f"of 4; write --model.width {width + 4 - width % 4}"
            )
        self.patches = nnx.Conv(
            channels, width, (patch, patch), strides=patch, padding="VALID", kernel_init=_of_patches, rngs=rngs
        )
        self.condition = Condition(SINES, width, num_classes, rngs=rngs)
        block = functools.partial(ModulatedBlock, width, heads, implementation=implementation)
        self.blocks = in_series(block, depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, use_scale=False, use_bias=False, rngs=rngs)
        self.modulation = nnx.Linear(width, 2 * width, kernel_init=ZEROS, rngs=rngs)
        self.head = nnx.Linear(width, patch * patch * channels, kernel_init=ZEROS, rngs=rngs)
        self.patch = patch

    def __call__(
        self, images: Float[Array, "B H W C"], times: Int[Array, " B"], labels: Int[Array, " B"] | None = None
    ) -> Float[Array, "B H W C"]:
        """Computes the prediction for noisy images at their times; the label K stands for none of K classes."""
        condition = self.condition(times, labels)
        x = self.patches(images)
        _, rows, columns, width = x.shape
        x = x.reshape(x.shape[0], -1, width)
        x = with_positions(x, jnp.asarray(grid_positions(rows, columns, width)))
        x = through(self.blocks, x, condition)
        shift, scale = jnp.split(self.modulation(condition), 2, axis=-1)
        x = self.head(modulated(self.norm(x), shift, scale))
        x = x.reshape(x.shape[0], rows, columns, self.patch, self.patch, -1)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)


@functools.cache
def grid_positions(rows: int, columns: int, width: int) -> np.ndarray:
    """Computes the fixed embedding of each patch, float32 [rows * columns, width].

    The first half is the column's, the second the row's; each is sines, then cosines, of frequencies that fall from 1
    to almost 1 / `SLOWEST`.
    """
    frequencies = SLOWEST ** (-np.arange(width // 4) / (width // 4))
    row, column = (place.reshape(-1, 1) * frequencies for place in np.mgrid[:rows, :columns])
    return np.concatenate([np.sin(column), np.cos(column), np.sin(row), np.cos(row)], axis=1).astype(np.float32)


dit_s2 = functools.partial(DiT, width=384, depth=12, heads=6)
dit_b2 = functools.partial(DiT, width=768, depth=12, heads=12)
dit_l2 = functools.partial(DiT, width=1024, depth=24, heads=16)
dit_xl2 = functools.partial(DiT, width=1152, depth=28, heads=16)
