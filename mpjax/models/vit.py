"""Vision Transformer: an image as a sequence of patches.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv:2010.11929); sizes Ti and S of Touvron et al., 2020
(arXiv:2012.12877). The mean over patches as the head's input, in place of a class token, is as in Beyer et al., 2022
(arXiv:2205.01580); it also leaves an even number of positions, which fused attention needs for training.

Shapes: B batch, H height, W width, C channels, T patches, D width of the network; images are B H W C.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.attention import Implementation
from mpjax.models.transformer import INIT, Block, dropping, with_positions
from mpjax.precision.dtypes import FLOAT32, widest


class ViT(nnx.Module):
    """Patches, learned positions, pre-norm blocks, a last norm, and a linear classifier.

    Args:
      image_shape: height, width and channels of an image.
      num_classes: number of logits.
      patch: side of a patch in pixels; divides height and width.
      width: D.
      depth: number of blocks.
      heads: heads of the attention; divide the width.
      pool: what the classifier sees: "gap" for the mean over patches, "cls" for a learned token put before them.
      dropout: share of values set to zero in training.
      epsilon: of the layer norms; Hugging Face's have 1e-12.
      implementation: of the attention.
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
    ):
        rows, columns, channels = image_shape
        if rows % patch or columns % patch:
            raise UsageError(
                f"images of {rows} x {columns} pixels are not made of patches of {patch} x {patch}: "
                "write a `patch` that divides both"
            )
        if pool not in ("gap", "cls"):
            raise UsageError(f"pool '{pool}': wanted 'gap' (mean over patches) or 'cls' (class token)")
        positions = (rows // patch) * (columns // patch) + (pool == "cls")
        self.patches = nnx.Conv(
            channels, width, (patch, patch), strides=patch, padding="VALID", kernel_init=INIT, rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width))) if pool == "cls" else None
        self.positions = nnx.Param(INIT(rngs.params(), (positions, width)))
        self.dropout = dropping(dropout, rngs)
        self.blocks = nnx.List(
            [
                Block(width, heads, epsilon=epsilon, dropout=dropout, implementation=implementation, rngs=rngs)
                for _ in range(depth)
            ]
        )
        self.norm = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images [B, H, W, C] to logits [B, num_classes]."""
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.class_token is not None:
            x = jnp.concatenate([_spread(self.class_token[...], x), x], axis=1)
        x = self.dropout(with_positions(x, self.positions[...]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(jnp.mean(x, axis=1) if self.class_token is None else x[:, 0])


def _spread(token: jax.Array, x: jax.Array) -> jax.Array:
    """A token [1, 1, D] for each sequence of x [B, T, D], in its dtype; its gradients add up in float32."""
    wide = token.astype(widest(token.dtype, FLOAT32))
    return jnp.broadcast_to(wide, (x.shape[0], *wide.shape[1:])).astype(x.dtype)


vit_ti16 = functools.partial(ViT, width=192, depth=12, heads=3)
vit_s16 = functools.partial(ViT, width=384, depth=12, heads=6)
vit_b16 = functools.partial(ViT, width=768, depth=12, heads=12)
