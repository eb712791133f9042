"""Vision Transformer: a Transformer encoder over the patches of an image.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv:2010.11929); sizes Ti and S are from Touvron et al.,
2020 (arXiv:2012.12877). By default the head reads the mean over patches instead of a class token, as in Beyer et al.,
2022 (arXiv:2205.01580).

Shapes: B batch, H height, W width, C channels, T patches, D width of the network, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.attention import Implementation
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, Block, NormKernel, dropping, pre_norm_by, with_positions
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def require_patches(rows: int, columns: int, patch: int) -> None:
    """Raises UsageError if patches do not divide an image, with the largest smaller patch that does."""
    if rows % patch or columns % patch:
        fitting = max(size for size in range(1, patch + 1) if not (rows % size or columns % size))
        raise UsageError(
            f"images of {rows} x {columns} pixels cannot be cut into patches of {patch} x {patch}: write "
            f"--model.patch {fitting}, or another number that divides both"
        )


class ViT(nnx.Module):
    """Patch embedding, learned positions, pre-norm blocks, a final norm, and a linear classifier.

    Args:
      image_shape: height, width and channels of an image.
      num_classes: number of logits.
      patch: height and width of a patch in pixels; if it does not divide height and width, raises UsageError.
      width: D.
      depth: number of blocks.
      heads: number of attention heads, a divisor of the width.
      pool: input of the classifier: "gap" for the mean over patches, "cls" for a learned token before the patches;
        others raise UsageError.
      dropout: dropout rate.
      epsilon: epsilon of the layer norms; Hugging Face's models have 1e-12.
      implementation: attention implementation; see `attend`.
      norm_kernel: what computes the backward pass of the blocks' norms on NVIDIA GPUs; see `pre_norm_by`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(
        self,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        rngs: nnx.Rngs,
        patch: int = 16,
        width: int,
        depth: int,
        heads: int,
        pool: Literal["gap", "cls"] = "gap",
        dropout: float = 0.0,
        epsilon: float = 1e-6,
        implementation: Implementation = "auto",
        norm_kernel: NormKernel = "xla",
        scan_blocks: bool = False,
    ):
        rows, columns, channels = image_shape
        require_patches(rows, columns, patch)
        if pool not in ("gap", "cls"):
            raise UsageError(f"pool '{pool}': wanted 'gap' (mean over patches) or 'cls' (class token)")
        positions = (rows // patch) * (columns // patch) + (pool == "cls")
        self.patches = nnx.Conv(
            channels, width, (patch, patch), strides=patch, padding="VALID", kernel_init=INIT, rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width))) if pool == "cls" else None
        self.positions = nnx.Param(INIT(rngs.params(), (positions, width)))
        self.dropout = dropping(dropout, rngs)
        block = functools.partial(
            Block,
            width,
            heads,
            order=pre_norm_by(norm_kernel),
            epsilon=epsilon,
            dropout=dropout,
            implementation=implementation,
        )
        self.blocks = in_series(block, depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.class_token is not None:
            x = jnp.concatenate([spread(self.class_token[...], x), x], axis=1)
        x = self.dropout(with_positions(x, self.positions[...]))
        x = through(self.blocks, x)
        x = self.norm(x)
        return self.head(jnp.mean(x, axis=1) if self.class_token is None else x[:, 0])


def spread(token: jax.Array, x: jax.Array) -> jax.Array:
    """Repeats a token [1, 1, D] to [B, 1, D], one for each sequence of x, in x's dtype; sums gradients in float32."""
    wide = token.astype(widest(token.dtype, FLOAT32))
    return jnp.broadcast_to(wide, (x.shape[0], *wide.shape[1:])).astype(x.dtype)


vit_ti16 = functools.partial(ViT, width=192, depth=12, heads=3)
vit_s16 = functools.partial(ViT, width=384, depth=12, heads=6)
vit_b16 = functools.partial(ViT, width=768, depth=12, heads=12)
