"""The settings of the networks for images that are read from Hugging Face files."""

import dataclasses
from typing import Literal

from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTSettings:
    """The settings of a `VisionTransformer`. The defaults are those of ViT.

    Raises UsageError if `heads` does not divide `width`.

    Attributes:
      family: whose names the weights have in files of transformers.
      image_size: the side of the images that the position embeddings are for.
      patch: the side of a patch in pixels.
      channels: the channels of an image.
      width: D.
      depth: the number of blocks.
      heads: the number of attention heads, a divisor of the width.
      hidden: the hidden width of the MLP.
      gated: whether the MLP is a `GatedMLP`.
      activation: the activation of the MLP, or of its gate.
      epsilon: epsilon of the norms.
      dropout: the dropout rate of embeddings, in training.
      block_dropout: that of the outputs of attention and MLP.
      drop_path: the rate at which the attention of an example, or its MLP, is dropped, in training.
      layer_scale: the initial values of the factors of each channel behind attention and MLP; None for no factors.
      registers: the number of tokens without positions, behind the class token (Darcet et al., arXiv:2309.16588).
      distilled: whether there is a second token behind the class token (Touvron et al., arXiv:2012.12877).
      second_head: whether it has a head of its own, and logits are the mean of both.
      head_of_patches: whether the head reads the mean of the patches beside the class token.
      antialias: whether position embeddings are averaged where they are interpolated to fewer patches.
      rope: the base of the frequencies of rotary position embeddings, which take the place of the table of positions;
        None for the table.
      unbiased: the names of projections in attention, of "query", "key" and "value", that have no bias.
    """

    family: Literal["vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit"] = "vit"
    image_size: int = 224
    patch: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    gated: bool = False
    activation: Literal["gelu", "tanh_gelu", "relu", "silu"] = "gelu"
    epsilon: float = 1e-12
    dropout: float = 0.0
    block_dropout: float = 0.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    registers: int = 0
    distilled: bool = False
    second_head: bool = False
    head_of_patches: bool = False
    antialias: bool = False
    rope: float | None = None
    unbiased: tuple[Literal["query", "key", "value"], ...] = ()

    def __post_init__(self):
        require_heads(self.width, self.heads)
        if self.rope is not None and self.width // self.heads % 4:
            raise UsageError(
                f"rotary position embeddings of rows and columns turn heads of 4, 8, 12, ... features, got "
                f"{self.width // self.heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNeXtV2Settings:
    """The settings of a `ConvNeXtV2`.

    Attributes:
      channels: the channels of an image.
      patch: the side of the stem's patches in pixels.
      width: the channels of the first stage, doubled by each later stage.
      depths: the number of blocks in each stage.
      drop_path: the rate at which the last block is dropped in training; it grows from 0 for the first block.
      epsilon: epsilon of the last norm.
    """

    channels: int = 3
    patch: int = 4
    width: int = 96
    depths: tuple[int, ...] = (3, 3, 9, 3)
    drop_path: float = 0.0
    epsilon: float = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwinSettings:
    """The settings of a `Swin`.

    Raises UsageError if the heads of a stage do not divide its width.

    Attributes:
      channels: the channels of an image.
      patch: the side of a patch in pixels.
      width: the width of the first stage, doubled by each later stage.
      depths: the number of blocks in each stage.
      heads: the number of attention heads in each stage, a divisor of its width.
      window: the side of a window in patches.
      mlp_ratio: the hidden width of an MLP by the width of its stage.
      activation: the activation of the MLPs.
      dropout: the dropout rate of embeddings, and of the outputs of attention and MLP, in training.
      drop_path: the rate at which attention, or the MLP, of the last block is dropped; it grows from 0 for the first.
      epsilon: epsilon of the norms, but those of patches and of merged patches, which have 1e-5.
    """

    channels: int = 3
    patch: int = 4
    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    mlp_ratio: float = 4.0
    activation: Literal["gelu", "tanh_gelu", "relu"] = "gelu"
    dropout: float = 0.0
    drop_path: float = 0.1
    epsilon: float = 1e-5

    def __post_init__(self):
        for stage, heads in enumerate(self.heads):
            require_heads(self.width * 2**stage, heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerSettings:
    """The settings of a `VisionTower`. The defaults are those of SigLIP.

    Attributes:
      kind: whose tower it is: CLIP's has a class token, and a norm before the blocks.
      image_size: the side of the images that the position embeddings are for.
      patch: the side of a patch in pixels.
      channels: the channels of an image.
      width: D.
      depth: the number of blocks.
      heads: the number of attention heads, a divisor of the width.
      hidden: the hidden width of the MLP.
      activation: the activation of the MLP.
      epsilon: epsilon of the norms.
    """

    kind: Literal["clip", "siglip"] = "siglip"
    image_size: int = 224
    patch: int = 16
    channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    activation: Literal["gelu", "tanh_gelu", "quick_gelu"] = "tanh_gelu"
    epsilon: float = 1e-6

    def __post_init__(self):
        require_heads(self.width, self.heads)


def require_heads(width: int, heads: int) -> None:
    """Raises UsageError if `heads` does not divide `width`."""
    if width % heads:
        raise UsageError(f"a network of width {width} cannot have {heads} heads: wanted a divisor of {width}")


Settings = ViTSettings | ConvNeXtV2Settings | SwinSettings | TowerSettings


def check_images(settings: ViTSettings | TowerSettings, image_shape: tuple[int, int, int]) -> None:
    """Raises UsageError if images [H, W, C] have other channels than the settings, or patches do not divide them."""
    rows, columns, channels = image_shape
    patch = settings.patch
    if channels != settings.channels:
        raise UsageError(
            f"images have {channels} channels, and config.json of the network says num_channels {settings.channels}: "
            "convert the images, by --data.preprocess FILE.py:NAME"
        )
    if rows % patch or columns % patch:
        raise UsageError(
            f"images of {rows} x {columns} pixels cannot be cut into patches of {patch} x {patch}: "
            f"write --data.image_size {settings.image_size}, or another multiple of {patch}",
            repair={"data.image_size": settings.image_size},
        )
