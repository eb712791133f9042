"""A network that learns CIFAR-10 within seconds on a GPU, and its optimizer: parts of your own for the trainer.

    python scripts/train.py --config examples/airbench.toml

Whitened patches, three blocks, no shortcuts: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024
(arXiv:2404.00498), after Page, "How to Train Your ResNet", 2019. Muon for the filters, SGD with momentum for the rest:
Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon).

Shapes: N examples, B batch, H height, W width, C channels, P the values of a 2x2 patch, F filters, K classes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import contrib

import mpjax
from mpjax.models import gelu, max_pool


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
    (`mpjax.extend.FromImages`). Checkpoints hold it, and no step changes it. Until then, the kernel copies the pixels
    of a patch.
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
        wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
        return y + jnp.broadcast_to(wide, y.shape).astype(y.dtype)

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
Norm = functools.partial(nnx.BatchNorm, momentum=0.6, epsilon=1e-12, use_scale=False)


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

    The blocks leave 3x3 pixels of a 32x32 image. For larger images, the maxima are averaged. In evaluation, the logits
    are the means over `views` of an image, which run as one batch.

    Args:
      fields: the fields of a batch, `image` and `label`.
      rngs: the random streams for initial values.
      width: channels of the first block; the other two have four times as many.
    """

    def __init__(self, fields: Mapping[str, Any], *, rngs: nnx.Rngs, width: int = 64):
        channels, num_classes = fields["image"].shape[2], fields["label"].num_classes
        self.deterministic = False  # `model.eval()` sets it to True, as for dropout
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
            raise mpjax.UsageError(
                f"airbench needs images of {SMALLEST}x{SMALLEST} pixels or more, got {x.shape[1]}x{x.shape[2]}; write "
                f"--data.image_size {SMALLEST} or more"
            )
        return mean_logits(self.logits, views(x)) if self.deterministic else self.logits(x)

    def logits(self, x: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
        """Computes logits from the images as they are."""
        x = gelu(self.whitening(x))
        for block in self.blocks:
            x = block(x)
        # Not jnp.max: in float16 its gradient was not finite in some steps on a CPU (docs/questions.md).
        window = min(3, *x.shape[1:3])
        x = max_pool(x, window, window)
        return self.head(jnp.mean(x, axis=(1, 2)) * LOGITS)


Weighted = Sequence[tuple[float, jax.Array]]
"""Views [B, H, W, C] of the same images, each with its weight; the weights add up to 1."""


def views(images: Float[Array, "B H W C"]) -> Weighted:
    """The images, and shifted by a pixel down to the right and up to the left; each also mirrored from left to right.

    The border is padded by reflection. The shifted views together have the weight of the unshifted ones.
    """
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = padded[:, :height, :width], padded[:, 2:, 2:]
    halves = [(0.25, images), *((0.125, view) for view in shifted)]
    return [(weight, view) for weight, half in halves for view in (half, half[:, :, ::-1])]


def mean_logits(model: Callable[[jax.Array], jax.Array], views: Weighted) -> Float[Array, "B K"]:
    """Averages the logits of views by weight, in float32 or wider. The model runs once, on all views as one batch."""
    logits = model(jnp.concatenate([view for _, view in views]))
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    per_view = jnp.split(wide, len(views))
    return jnp.sum(jnp.stack([weight * x for (weight, _), x in zip(views, per_view, strict=True)]), axis=0)


FILTERS, REST = "filters", "rest"

_AS_MATRIX = contrib.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
"""A filter [height, width, inputs, outputs] is a matrix with one column per output."""


def muon_and_sgd(
    learning_rate: optax.Schedule,
    *,
    peak: float,
    weight_decay: float,
    mask: Callable[[Any], Any],
    momentum: float = 0.6,
    rest_learning_rate: float = 100.0,
    rest_momentum: float = 0.85,
    normalise: bool = True,
) -> optax.GradientTransformation:
    """Builds the rule that orthogonalizes the momentum of each filter and updates all other parameters by SGD.

    The update of a filter has singular values of about 1, whatever the size of the gradient. They are multiplied by the
    learning rate, and by sqrt(outputs / inputs) if the filter has more outputs than inputs. Both rules use Nesterov
    momentum.

    Args:
      learning_rate: learning rate of filters, which are the parameters of four axes.
      peak: the largest value of `learning_rate`.
      weight_decay: weight decay; decoupled from the gradient for filters, added to it for all other parameters.
      mask: maps all parameters to the flags of those that decay.
      momentum: momentum coefficient of filters.
      rest_learning_rate: peak learning rate of all other parameters, in proportion to `learning_rate`.
      rest_momentum: momentum coefficient of all other parameters.
      normalise: whether each step scales filters to a norm of sqrt(outputs) before it adds the update; filters then do
        not decay.

    Raises:
      UsageError: `peak` is 0; or, in `init`, no parameter is a filter.
    """
    if not peak:
        raise mpjax.UsageError(
            "--optimizer.learning_rate is 0: wanted a positive rate, of which rest_learning_rate is a multiple"
        )
    filters = optax.chain(
        contrib.scale_by_muon(beta=momentum, nesterov=True, weight_dimension_numbers=_matrices),
        # A matrix that is wider than high, with singular values 1, shrinks its inputs.
        optax.stateless(lambda updates, _: jax.tree.map(_scaled_by_shape, updates)),
        optax.identity() if normalise else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.stateless(_to_unit_columns) if normalise else optax.identity(),
    )
    share = rest_learning_rate / peak
    rest = optax.chain(
        optax.add_decayed_weights(weight_decay, mask),
        optax.sgd(lambda count: share * learning_rate(count), rest_momentum, nesterov=True),
    )
    return optax.partition({FILTERS: filters, REST: rest}, _kinds)


def _kinds(params: Any) -> Any:
    kinds = jax.tree.map(lambda p: FILTERS if p.ndim == 4 else REST, params)
    if FILTERS not in jax.tree.leaves(kinds):
        raise mpjax.UsageError(
            "--optimizer.name examples/airbench.py:muon_and_sgd: the model has no convolution of images, whose filters "
            "it is for; write adamw or sgd"
        )
    return kinds


def _matrices(updates: Any) -> Any:
    return jax.tree.map(lambda _: _AS_MATRIX, updates)


def _to_unit_columns(updates: Any, params: Any) -> Any:
    """Adds to each update the change that scales its filter to a norm of sqrt(outputs): columns of norm about 1."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        # Float32: squares of half-precision values overflow.
        wide = param.astype(jnp.promote_types(param.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(jnp.square(wide)))
        factor = jnp.where(norm > 0, math.sqrt(param.shape[-1]) / jnp.where(norm > 0, norm, 1), 1)
        return (update.astype(wide.dtype) + (factor - 1) * wide).astype(update.dtype)

    return jax.tree.map(one, updates, params)


def _scaled_by_shape(update: jax.Array) -> jax.Array:
    *inputs, outputs = update.shape
    return update * max(1.0, outputs / math.prod(inputs)) ** 0.5
