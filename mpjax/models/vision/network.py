"""The ViT of Hugging Face files: ViT, DeiT, DINOv2 and DINOv3, one network whose settings tell them apart.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv:2010.11929); Touvron et al., "Training Data-efficient
Image Transformers & Distillation through Attention", 2020 (arXiv:2012.12877); Oquab et al., "DINOv2", 2023
(arXiv:2304.07193); Darcet et al., "Vision Transformers Need Registers", 2023 (arXiv:2309.16588); Siméoni et al.,
"DINOv3", 2025 (arXiv:2508.10104).

Shapes: B batch, H height, W width, C channels, T tokens and patches, D width of the network, K classes; images are
B H W C.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
from flax import nnx

from mpjax.models.attention import Attend, Attention, Implementation
from mpjax.models.convnext import LayerScale
from mpjax.models.gated_mlp import GatedMLP, same
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, MLP, dropping, pre_norm, with_positions
from mpjax.models.vision.activation_functions import ACTIVATIONS
from mpjax.models.vision.positions import interpolated
from mpjax.models.vision.settings import ViTSettings, check_images
from mpjax.models.vit import spread
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


class VisionTransformer(nnx.Module):
    """Patch embedding, positions, pre-norm blocks, a final norm, and a linear classifier.

    Learned position embeddings are those of the file, of its `image_size`, and are interpolated for images of another
    size.

    Args:
      settings: the sizes and the kind of the network.
      image_shape: height, width and channels of an image.
      num_classes: number of logits.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Raises:
      UsageError: images have other channels than the settings, or the patch does not divide height and width.
    """

    def __init__(
        self,
        settings: ViTSettings,
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        implementation: Implementation = "auto",
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        width, patch = settings.width, settings.patch
        check_images(settings, image_shape)
        self.settings = settings
        self.patches = nnx.Conv(
            settings.channels, width, (patch, patch), strides=patch, padding="VALID", kernel_init=INIT, rngs=rngs
        )
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.distillation_token = nnx.Param(jnp.zeros((1, 1, width))) if settings.distilled else None
        self.registers = nnx.Param(jnp.zeros((1, settings.registers, width))) if settings.registers else None
        positions = (settings.image_size // patch) ** 2 + 1 + settings.distilled
        self.positions = None if settings.rope else nnx.Param(INIT(rngs.params(), (positions, width)))
        self.dropout = dropping(settings.dropout, rngs)
        block = functools.partial(VisionBlock, settings, implementation=implementation)
        self.blocks = in_series(block, settings.depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        head = functools.partial(nnx.Linear, width * (1 + settings.head_of_patches), num_classes, kernel_init=INIT)
        self.head = TwoHeads(head(rngs=rngs), head(rngs=rngs)) if settings.second_head else head(rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        x = self.features(x)
        if isinstance(self.head, TwoHeads):
            return self.head(x[:, 0], x[:, 1])
        first = x[:, 0]
        if self.settings.head_of_patches:
            first = jnp.concatenate([first, jnp.mean(x[:, 1 + self.settings.registers :], axis=1)], axis=-1)
        return self.head(first)

    def features(self, x: Float[Array, "B H W C"]) -> Float[Array, "B T D"]:
        """Computes the features after the last norm: class token, second token or registers, patches."""
        settings = self.settings
        x = self.patches(x)
        _, rows, columns, width = x.shape
        x = x.reshape(x.shape[0], -1, width)
        tokens = [token[...] for token in (self.class_token, self.distillation_token) if token is not None]
        x = jnp.concatenate([*(spread(token, x) for token in tokens), x], axis=1)
        attends = None
        if settings.rope:
            attends = self._rotating(rows, columns, 1 + settings.registers, x.dtype)
        else:
            x = with_positions(x, self._positions(rows, columns))
        if self.registers is not None:
            x = jnp.concatenate([x[:, :1], spread(self.registers[...], x), x[:, 1:]], axis=1)
        return self.norm(through(self.blocks, self.dropout(x), None, attends))

    def _rotating(self, rows: int, columns: int, others: int, dtype: Any) -> Attend:
        """Attention that first turns the queries and keys of patches; those of the `others` tokens before stay."""
        from mpjax.models.vision.patch_rotation import rotating_patches  # local, as one family has it

        features, theta = self.settings.width // self.settings.heads, self.settings.rope or 0.0
        return rotating_patches(rows, columns, others, theta=theta, features=features, dtype=dtype)

    def _positions(self, rows: int, columns: int) -> Float[Array, "T D"]:
        settings, table = self.settings, cast(nnx.Param, self.positions)[...]
        side = settings.image_size // settings.patch
        if (rows, columns) == (side, side):
            return table
        tokens = 1 + settings.distilled
        patches = interpolated(table[tokens:], (rows, columns), antialias=settings.antialias)
        return jnp.concatenate([table[:tokens].astype(patches.dtype), patches])


class TwoHeads(nnx.Module):
    """The mean of the logits of two tokens, each with a head."""

    def __init__(self, first: nnx.Linear, second: nnx.Linear):
        self.first = first
        self.second = second

    def __call__(self, first: Float[Array, "B D"], second: Float[Array, "B D"]) -> Float[Array, "B K"]:
        one, two = self.first(first), self.second(second)
        wide = widest(one.dtype, FLOAT32)
        return ((one.astype(wide) + two.astype(wide)) / 2).astype(one.dtype)


class VisionBlock(nnx.Module):
    """Attention and an MLP behind a norm each, both with a residual connection; layer scale and dropped paths if set.

    Args:
      settings: the settings of the network.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
    """

    def __init__(self, settings: ViTSettings, *, implementation: Implementation = "auto", rngs: nnx.Rngs):
        width, hidden, scale = settings.width, settings.hidden, settings.layer_scale
        inits: dict[str, Any] = {"kernel_init": INIT, "out_init": INIT}
        self.norm1 = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        self.attention = Attention(
            width, settings.heads, implementation=implementation, unbiased=settings.unbiased, **inits, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        if settings.gated:
            self.mlp = GatedMLP(width, hidden, activation=settings.activation, use_bias=True, **inits, rngs=rngs)
        else:
            self.mlp = MLP(width, hidden, ACTIVATIONS[settings.activation], **inits, rngs=rngs)
        self.scale1 = same if scale is None else LayerScale(width, scale)
        self.scale2 = same if scale is None else LayerScale(width, scale)
        self.dropout = dropping(settings.block_dropout, rngs)
        # One random number per example keeps or drops the whole change.
        self.drop_path = (
            nnx.Dropout(settings.drop_path, broadcast_dims=(1, 2), rngs=rngs) if settings.drop_path else same
        )

    def __call__(
        self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None = None, attends: Attend | None = None
    ) -> Float[Array, "B T D"]:
        x = pre_norm(
            x, self.norm1, lambda x: self.drop_path(self.scale1(self.dropout(self.attention(x, lengths, attends))))
        )
        return pre_norm(x, self.norm2, lambda x: self.drop_path(self.scale2(self.dropout(self.mlp(x)))))
