"""CLIP and SigLIP: a vector of an image and one of a text, which are near to each other if both belong together.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021 (arXiv:2103.00020); Zhai
et al., "Sigmoid Loss for Language Image Pre-Training", 2023 (arXiv:2303.15343).

Shapes: B batch, H height, W width, C channels, T tokens, D width of a tower, E features of a vector, N heads.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.attention import Attention
from mpjax.models.image_text.settings import ImageTextSettings, TextSettings
from mpjax.models.scan import in_series, through
from mpjax.models.transformer import INIT, MLP, Block, check_length, with_positions
from mpjax.models.vision.activation_functions import ACTIVATIONS
from mpjax.models.vision.settings import TowerSettings
from mpjax.models.vision.tower import NORMAL, VisionTower
from mpjax.models.vit import spread
from mpjax.precision.attention import dot_product_attention
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


LARGEST = math.log(100)
"""The logarithm of what CLIP's cosines are multiplied by at most (section 2.5 of its paper)."""


class ImageText(nnx.Module):
    """A tower for images, a tower for texts, and the temperature of the comparison.

    Args:
      settings: the sizes and the kind of the network.
      image_shape: height, width and channels of an image.
      scan_blocks: whether the blocks of each tower are one loop over stacked arrays; see `mpjax.models.scan`.
    """

    def __init__(
        self,
        settings: ImageTextSettings,
        *,
        image_shape: tuple[int, int, int],
        scan_blocks: bool = False,
        rngs: nnx.Rngs,
    ):
        vision, text, features = settings.vision, settings.text, settings.features
        is_clip = vision.kind == "clip"
        linear = functools.partial(nnx.Linear, kernel_init=NORMAL, use_bias=not is_clip, rngs=rngs)
        self.settings = settings
        self.vision = VisionTower(vision, image_shape=image_shape, scan_blocks=scan_blocks, rngs=rngs)
        self.vision_norm = nnx.LayerNorm(vision.width, epsilon=vision.epsilon, rngs=rngs)
        self.vision_out = linear(vision.width, features) if is_clip else Pooling(vision, rngs=rngs)
        self.text = TextTower(text, is_causal=is_clip, scan_blocks=scan_blocks, rngs=rngs)
        self.text_out = linear(text.width, features)
        self.temperature = Temperature(settings.scale, settings.bias, largest=LARGEST if is_clip else None)

    def __call__(
        self, images: Float[Array, "B H W C"], tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> Float[Array, "B 2 E"]:
        """Computes the vectors of images and of texts, which are not normalized.

        Args:
          images: the images.
          tokens: int32, padded on the right.
          lengths: int32, the number of tokens of each text that are not padding.
        """
        vectors = self.of_images(images), self.of_texts(tokens, lengths)
        wide = widest(*(x.dtype for x in vectors))
        return jnp.stack([x.astype(wide) for x in vectors], axis=1)

    def of_images(self, images: Float[Array, "B H W C"]) -> Float[Array, "B E"]:
        """Computes the vectors of images."""
        x = self.vision(images)
        return self.vision_out(self.vision_norm(x if self.vision.class_token is None else x[:, 0]))

    def of_texts(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B E"]:
        """Computes the vectors of texts; raises UsageError if there are more tokens than the tower has positions."""
        return self.text_out(self.text(tokens, lengths))


class TextTower(nnx.Module):
    """Embeddings of tokens, learned positions, pre-norm blocks and a norm.

    In CLIP, tokens attend to earlier ones, and the last token of a text, which ends it, stands for the text. In SigLIP,
    tokens attend to all positions, padding too, and the last position stands for the text.
    """

    def __init__(self, settings: TextSettings, *, is_causal: bool, scan_blocks: bool, rngs: nnx.Rngs):
        width = settings.width
        self.settings = settings
        self.is_causal = is_causal
        self.tokens = nnx.Embed(settings.vocabulary, width, embedding_init=INIT, rngs=rngs)
        self.positions = nnx.Param(INIT(rngs.params(), (settings.length, width)))
        block = functools.partial(
            Block,
            width,
            settings.heads,
            hidden=settings.hidden,
            activation=ACTIVATIONS[settings.activation],
            epsilon=settings.epsilon,
            is_causal=is_causal,
            kernel_init=NORMAL,
            out_init=NORMAL,
        )
        self.blocks = in_series(block, settings.depth, rngs=rngs, scan=scan_blocks)
        self.norm = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
        """Computes the features of the position that stands for each text."""
        check_length(tokens, self.settings.length)
        x = through(self.blocks, with_positions(self.tokens(tokens), self.positions[...]))
        if not self.is_causal:
            return self.norm(x[:, -1])
        last = jnp.arange(x.shape[1], dtype=jnp.int32)[None] == jnp.maximum(lengths, 1)[:, None] - 1
        # A sum of one number and zeros, which no dtype rounds: the derivative of a gather would be a scatter.
        return self.norm(jnp.sum(jnp.where(last[..., None], x, jnp.zeros_like(x)), axis=1))


class Pooling(nnx.Module):
    """Attention of a learned query to all patches, and an MLP behind a norm, with a residual connection around both."""

    def __init__(self, settings: TowerSettings, *, rngs: nnx.Rngs):
        width = settings.width
        inits: dict[str, Any] = {"kernel_init": NORMAL, "out_init": NORMAL}
        self.probe = nnx.Param(INIT(rngs.params(), (1, 1, width)))
        self.attention = Attention(width, settings.heads, **inits, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        self.mlp = MLP(width, settings.hidden, ACTIVATIONS[settings.activation], **inits, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        layers = self.attention
        query = layers.query(spread(self.probe[...], x))
        mixed = layers.out(dot_product_attention(query, layers.key(x), layers.value(x)))[:, 0]
        change = self.mlp(self.norm(mixed))
        # A policy lets the last layer of a network write float32.
        return mixed.astype(widest(mixed.dtype, change.dtype)) + change


class Temperature(nnx.Module):
    """What cosines are multiplied by, and the bias that is added: parameters in float32 under every policy.

    The parameter is the logarithm of the factor, of which more than `largest` has no effect. Its derivative goes
    through that limit, so that it can come back. The rule `type:Temperature`, which all policies have, keeps the
    parameters in float32.
    """

    def __init__(self, scale: float, bias: float | None, *, largest: float | None):
        self.scale = nnx.Param(jnp.full((1,), scale, FLOAT32))
        self.bias = None if bias is None else nnx.Param(jnp.full((1,), bias, FLOAT32))
        self.largest = largest

    def __call__(self, cosines: Float[Array, "B N"]) -> Float[Array, "B N"]:
        """Computes logits in float32 or wider."""
        wide = widest(cosines.dtype, FLOAT32)
        scale = self.scale[...].astype(wide)
        if self.largest is not None:
            scale = scale - jax.lax.stop_gradient(jnp.maximum(scale - self.largest, 0))
        logits = cosines.astype(wide) * jnp.exp(scale)[None]
        return logits if self.bias is None else logits + self.bias[...].astype(wide)[None]
