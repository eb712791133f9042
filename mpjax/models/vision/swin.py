"""Swin of Hugging Face files: attention within windows, which every second block shifts by half a window.

Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021 (arXiv:2103.14030).

Shapes: B batch, H height, W width, C channels, R and S rows and columns of patches, V windows, T patches of a window,
D width of a stage, N heads, K classes; images are B H W C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.attention import Attention
from mpjax.models.gated_mlp import same
from mpjax.models.transformer import INIT, MLP, dropping, pre_norm
from mpjax.models.vision.activation_functions import ACTIVATIONS
from mpjax.models.vision.settings import SwinSettings
from mpjax.precision.attention import dot_product_attention
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


HIDDEN = -100.0
"""What transformers adds to the scores of patches that were no neighbours before a shift."""


class Swin(nnx.Module):
    """Patch embedding, stages of blocks with a merging of patches between them, a norm, the mean, a linear classifier.

    Patches and windows at the lower and right edge are filled up with zeros, which attention reads, as in transformers.

    Args:
      settings: the sizes of the network.
      image_shape: height, width and channels of an image.
      num_classes: number of logits.

    Raises:
      UsageError: images have other channels than the settings, or the last stage has less than a window.
    """

    def __init__(self, settings: SwinSettings, *, image_shape: tuple[int, int, int], num_classes: int, rngs: nnx.Rngs):
        _check_images(settings, image_shape)
        width, patch = settings.width, settings.patch
        self.settings = settings
        self.patches = nnx.Conv(
            settings.channels, width, (patch, patch), strides=patch, padding="VALID", kernel_init=INIT, rngs=rngs
        )
        self.patch_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)
        layers: list[nnx.Module] = []
        last, number = max(sum(settings.depths) - 1, 1), 0
        for stage, depth in enumerate(settings.depths):
            if stage:
                layers.append(Merging(width * 2 ** (stage - 1), rngs=rngs))
            for index in range(depth):
                rate = settings.drop_path * number / last
                layers.append(SwinBlock(settings, stage, shifted=index % 2 == 1, drop_path=rate, rngs=rngs))
                number += 1
        self.layers = nnx.List(layers)
        width *= 2 ** (len(settings.depths) - 1)
        self.norm = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images."""
        return self.head(jnp.mean(self.features(x), axis=(1, 2)))

    def features(self, x: Float[Array, "B H W C"]) -> Float[Array, "B R S D"]:
        """Computes the features of the last stage after the last norm."""
        x = self.patch_norm(self.patches(filled(x, self.settings.patch)))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _check_images(settings: SwinSettings, image_shape: tuple[int, int, int]) -> None:
    rows, columns, channels = image_shape
    if channels != settings.channels:
        raise UsageError(
            f"images have {channels} channels, and config.json of the network says num_channels {settings.channels}: "
            "convert the images, by --data.preprocess FILE.py:NAME"
        )
    shrinks = settings.patch * 2 ** (len(settings.depths) - 1)
    if -(-min(rows, columns) // shrinks) < settings.window:
        size = shrinks * settings.window
        raise UsageError(
            f"images of {rows} x {columns} pixels have {-(-min(rows, columns) // shrinks)} rows or columns of patches "
            f"in the last stage, and windows are of {settings.window} x {settings.window}: write --data.image_size "
            f"{size}, or more",
            repair={"data.image_size": size},
        )


class SwinBlock(nnx.Module):
    """Attention within windows and an MLP behind a norm each, both with a residual connection.

    In training, attention and MLP of an example are dropped at the rate `drop_path`, each for itself.

    Args:
      settings: the settings of the network.
      stage: the number of the stage, from 0.
      shifted: whether windows are shifted by half a window, if there are several.
      drop_path: the rate.
    """

    def __init__(self, settings: SwinSettings, stage: int, *, shifted: bool, drop_path: float, rngs: nnx.Rngs):
        width, heads = settings.width * 2**stage, settings.heads[stage]
        inits: dict[str, Any] = {"kernel_init": INIT, "out_init": INIT}
        self.norm1 = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        self.attention = Attention(width, heads, **inits, rngs=rngs)
        self.positions = WindowPositions(settings.window, heads, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=settings.epsilon, rngs=rngs)
        hidden = int(settings.mlp_ratio * width)
        self.mlp = MLP(width, hidden, ACTIVATIONS[settings.activation], **inits, rngs=rngs)
        self.dropout = dropping(settings.dropout, rngs)
        # One random number per example keeps or drops the whole change.
        self.drop_path = nnx.Dropout(drop_path, broadcast_dims=(1, 2, 3), rngs=rngs) if drop_path else same
        self.window = settings.window
        self.shift = settings.window // 2 if shifted else 0

    def __call__(self, x: Float[Array, "B R S D"]) -> Float[Array, "B R S D"]:
        x = pre_norm(x, self.norm1, lambda x: self.drop_path(self.dropout(self._attended(x))))
        return pre_norm(x, self.norm2, lambda x: self.drop_path(self.dropout(self.mlp(x))))

    def _attended(self, x: Float[Array, "B R S D"]) -> Float[Array, "B R S D"]:
        _, rows, columns, _ = x.shape
        shift = self.shift if min(rows, columns) > self.window else 0
        x = filled(x, self.window)
        size = x.shape[1], x.shape[2]
        bias = self.positions()[None]
        if shift:
            x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
            bias = bias + jnp.asarray(_hidden(size, self.window, shift), bias.dtype)[:, None]
        windows = _windows(x, self.window)

        def attends(query, key, value, **_):
            shape = len(x), -1, *query.shape[1:]
            of_windows = dot_product_attention(*(y.reshape(shape) for y in (query, key, value)), bias=bias)
            return of_windows.reshape(query.shape)

        x = _image(self.attention(windows, None, attends), size, self.window)
        if shift:
            x = jnp.roll(x, (shift, shift), axis=(1, 2))
        return x[:, :rows, :columns]


class WindowPositions(nnx.Module):
    """A learned bias of the scores for each head and each distance within a window, in float32 whatever the policy."""

    def __init__(self, window: int, heads: int, *, rngs: nnx.Rngs):
        self.table = nnx.Param(INIT(rngs.params(), ((2 * window - 1) ** 2, heads), FLOAT32))
        self.window = window

    def __call__(self) -> Float[Array, "N T T"]:
        """Computes the bias of each pair of a query and a key in a window."""
        table = self.table[...]
        # Cast before the rows are taken: what takes a row many times adds its gradient in the dtype of the row.
        rows = table.astype(widest(table.dtype, FLOAT32))[jnp.asarray(_distances(self.window))]
        return jnp.moveaxis(rows, -1, 0)


def _distances(window: int) -> np.ndarray:
    """The row of the table for each query and key of a window, int32 [T, T]."""
    at = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij"), -1).reshape(-1, 2)
    rows, columns = np.moveaxis(at[:, None] - at[None] + window - 1, -1, 0)
    return (rows * (2 * window - 1) + columns).astype(np.int32)


def _hidden(size: tuple[int, int], window: int, shift: int) -> np.ndarray:
    """`HIDDEN` for each query and key of a shifted window that the shift brought together, else 0; [V, T, T]."""
    regions = [np.searchsorted([length - window, length - shift], np.arange(length), "right") for length in size]
    marks = (3 * regions[0][:, None] + regions[1][None])[None, :, :, None]
    windows = np.asarray(_windows(marks, window))[..., 0]
    return np.where(windows[:, :, None] == windows[:, None, :], 0.0, HIDDEN)


def filled(x: Any, side: int) -> Any:
    """Fills images up with zeros, below and at the right, to a multiple of `side` rows and columns."""
    missing = [-length % side for length in x.shape[1:3]]
    return jnp.pad(x, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0))) if any(missing) else x


def _windows(x: Any, window: int) -> Any:
    """Cuts images [B, R, S, D] into windows [B V, T, D]."""
    batch, rows, columns, width = x.shape
    x = x.reshape(batch, rows // window, window, columns // window, window, width)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, window * window, width)


def _image(x: jax.Array, size: tuple[int, int], window: int) -> jax.Array:
    """Joins windows [B V, T, D] to images [B, R, S, D] of `size` rows and columns."""
    (rows, columns), width = size, x.shape[-1]
    x = x.reshape(-1, rows // window, columns // window, window, window, width)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows, columns, width)


class Merging(nnx.Module):
    """Joins each 2 x 2 patches to one of twice the width."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(4 * width, epsilon=1e-5, rngs=rngs)
        self.reduction = nnx.Linear(4 * width, 2 * width, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, x: Float[Array, "B R S D"]) -> Float[Array, "B _ _ E"]:
        x = filled(x, 2)
        batch, rows, columns, width = x.shape
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, width).transpose(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(x.reshape(batch, rows // 2, columns // 2, 4 * width)))
