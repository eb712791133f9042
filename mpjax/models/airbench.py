"""A small network that learns CIFAR-10 within seconds on a GPU: whitened patches, three blocks, no shortcuts.

Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (arXiv:2404.00498), after Page, "How to Train Your
ResNet", 2019.

Shapes: N examples, B batch, H height, W width, C channels, P the values of a 2x2 patch, F filters, K classes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.activations import gelu
from mpjax.models.batch_norm import BatchNorm
from mpjax.models.pooling import max_pool
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


PATCH = 2
EPSILON = 5e-4
LOGITS = 1 / 64
"""The factor of the logits, which start small. The classifier learns at the rate of the biases."""

SMALLEST = 9
"""The side of the smallest image: whitening leaves 8 pixels, and three halvings leave 1."""


class Whitening(nnx.Module):
    """Projects each 2x2 patch onto the principal components of the training images' patches, with both signs.

    The kernel is a statistic, not a parameter. The trainer computes it from the training images before the first step
    (`from_images`). Checkpoints hold it, and no step changes it. Until then, the kernel copies the pixels of a patch.
    """

    def __init__(self, channels: int):
        values = PATCH**2 * channels
        self.kernel = nnx.BatchStat(_both_signs(jnp.eye(values), channels))
        self.bias = nnx.Param(jnp.zeros(2 * values))

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B I J F"]:
        kernel = self.kernel[...].astype(x.dtype)
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        bias = self.bias[...]
        # Broadcast before the cast down: the gradient is a sum over all pixels, which needs more than half precision.
        return y + jnp.broadcast_to(bias.astype(widest(bias.dtype, FLOAT32)), y.shape).astype(y.dtype)

    def from_images(self, images: Float[np.ndarray, "N H W C"]) -> dict[str, np.ndarray]:
        """Computes the kernel under which patches of these images are uncorrelated, with variances of about 1.

        Returns it as a new statistic, `{"kernel": array}`; the module does not change.
        """
        patches = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), axis=(1, 2))
        rows = patches.transpose(0, 1, 2, 4, 5, 3).reshape(-1, PATCH**2 * images.shape[-1])
        variances, components = np.linalg.eigh(rows.T.astype(np.float64) @ rows / len(rows))
        whitening = components / np.sqrt(variances + EPSILON)
        return {"kernel": np.asarray(_both_signs(whitening, images.shape[-1]), np.float32)}


def _both_signs(columns: Any, channels: int) -> Any:
    """Joins columns [P, P] and their negatives to a kernel [2, 2, C, F]."""
    joined = jnp.concatenate if isinstance(columns, jax.Array) else np.concatenate
    return joined([columns, -columns], axis=1).reshape(PATCH, PATCH, channels, -1)


def dirac(initial: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Builds an initializer of kernels whose first outputs copy the inputs; `initial` initializes the other outputs."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **kwargs) -> jax.Array:
        rows, columns, inputs, outputs = shape
        copied = min(inputs, outputs)
        kernel = initial(key, shape, dtype, **kwargs).at[..., :copied].set(0)
        same = jnp.arange(copied)
        return kernel.at[rows // 2, columns // 2, same, same].set(1)

    return init


# Uniform in +-1/sqrt(inputs), which is PyTorch's default.
Conv = functools.partial(
    nnx.Conv,
    kernel_size=(3, 3),
    use_bias=False,
    kernel_init=dirac(nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")),
)
# Without a scale: the next kernel scales each channel.
Norm = functools.partial(BatchNorm, momentum=0.6, epsilon=1e-12, use_scale=False)


class Block(nnx.Module):
    """Two 3x3 convolutions, each with batch norm and GELU; the first is pooled."""

    def __init__(self, channels_in: int, width: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv(channels_in, width, rngs=rngs)
        self.norm1 = Norm(width, rngs=rngs)
        self.conv2 = Conv(width, width, rngs=rngs)
        self.norm2 = Norm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = gelu(self.norm1(max_pool(self.conv1(x), 2, 2)))
        return gelu(self.norm2(self.conv2(x)))


class Airbench(nnx.Module):
    """Whitened patches, three blocks, the maximum over 3x3 pixels, linear classifier with small logits.

    The blocks leave 3x3 pixels of a 32x32 image. For larger images, the maxima are averaged.

    Args:
      channels: channels of the input image.
      width: channels of the first block; the other two have four times as many.
      num_classes: number of logits.
    """

    def __init__(self, *, channels: int, width: int = 64, num_classes: int, rngs: nnx.Rngs):
        self.whitening = Whitening(channels)
        widths = [2 * PATCH**2 * channels, width, 4 * width, 4 * width]
        self.blocks = nnx.List([Block(*pair, rngs=rngs) for pair in itertools.pairwise(widths)])
        init = nnx.initializers.normal(1 / (LOGITS * widths[-1]))
        self.head = nnx.Linear(widths[-1], num_classes, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from images.

        Raises:
          UsageError: the images are smaller than 9x9 pixels.
        """
        if min(x.shape[1:3]) < SMALLEST:
            raise UsageError(
                f"airbench needs images of {SMALLEST}x{SMALLEST} pixels or more, got {x.shape[1]}x{x.shape[2]}; write "
                f"--data.image_size {SMALLEST} or more"
            )
        x = gelu(self.whitening(x))
        for block in self.blocks:
            x = block(x)
        # Not jnp.max: in float16 its gradient was not finite in some steps on a CPU (docs/questions.md).
        window = min(3, *x.shape[1:3])
        x = max_pool(x, window, window)
        return self.head(jnp.mean(x, axis=(1, 2)) * LOGITS)
