"""The towers for images of CLIP and SigLIP, and a classifier on one.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021 (arXiv:2103.00020); Zhai
et al., "Sigmoid Loss for Language Image Pre-Training", 2023 (arXiv:2303.15343).

Shapes: B batch, H height, W width, C channels, T tokens, D width of the tower, K classes; images are B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from mpjax.models.gated_mlp import same
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, Block, with_positions
from mpjax.models.vision.activation_functions import ACTIVATIONS
from mpjax.models.vision.positions import interpolated
from mpjax.models.vision.settings import TowerSettings, check_images
from mpjax.models.vit import spread


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


NORMAL = nnx.initializers.lecun_normal()
"""Initial values of the layers of blocks, of any width."""


class VisionTower(nnx.Module):
    """Patch embedding, learned positions and pre-norm blocks; with CLIP's class token, and its norm before the blocks.

    The position embeddings are those of the file, of its `image_size`, and are interpolated for images of another size.

    Args:
      settings: the sizes and the kind of the tower.
      image_shape: height, width and channels of an image.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Raises:
      UsageError: images have other channels than the settings, or the patch does not divide height and width.
    """

    def __init__(
        self, settings: TowerSettings, *, image_shape: tuple[int, int, int], scan_blocks: bool = False, rngs: nnx.Rngs
    ):
        width, patch, is_clip = settings.width, settings.patch, settings.kind == "clip"
        check_images(settings, image_shape)
        self.settings = settings
        self.patches = nnx.Conv(
            settings.channels,
            width,
            (patch, patch),
            strides=patch,
            padding="VALID",
            use_bias=not is_clip,
            kernel_init=INIT,
            rngs=rngs,
        )
        self.class_token = nnx.Param(INIT(rngs.params(), (1, 1, width))) if is_clip else None
        self.positions = nnx.Param(INIT(rngs.params(), ((settings.image_size // patch) ** 2 + is_clip, width)))
        self.norm_before = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs) if is_clip else same
        block = functools.partial(
            Block,
            width,
            settings.heads,
            hidden=settings.hidden,
            activation=ACTIVATIONS[settings.activation],
            epsilon=settings.epsilon,
            kernel_init=NORMAL,
            out_init=NORMAL,
        )
        self.blocks = in_series(block, settings.depth, rngs=rngs, scan=scan_blocks)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B T D"]:
        """Computes the features of the class token, if there is one, and of the patches, without a last norm."""
        x = self.patches(x)
        _, rows, columns, width = x.shape
        x = x.reshape(x.shape[0], -1, width)
        if self.class_token is not None:
            x = jnp.concatenate([spread(self.class_token[...], x), x], axis=1)
        x = with_positions(x, self._positions(rows, columns))
        return through(self.blocks, self.norm_before(x))

    def _positions(self, rows: int, columns: int) -> Float[Array, "T D"]:
        table, side = self.positions[...], self.settings.image_size // self.settings.patch
        if (rows, columns) == (side, side):
            return table
        tokens = 0 if self.class_token is None else 1
        patches = interpolated(table[tokens:], (rows, columns), antialias=False)
        return jnp.concatenate([table[:tokens].astype(patches.dtype), patches])


class TowerClassifier(nnx.Module):
    """A tower, and a linear classifier of the mean of its patches, which SigLIP normalizes before."""

    def __init__(
        self,
        settings: TowerSettings,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        self.settings = settings
        self.vision = VisionTower(settings, image_shape=image_shape, scan_blocks=scan_blocks, rngs=rngs)
        is_clip = settings.kind == "clip"
        self.norm = same if is_clip else nnx.LayerNorm(settings.width, epsilon=settings.epsilon, rngs=rngs)
        self.head = nnx.Linear(settings.width, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.norm(self.vision(x))
        return self.head(jnp.mean(x if self.vision.class_token is None else x[:, 1:], axis=1))
