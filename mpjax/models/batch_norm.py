"""Batch norm and ReLU. The backward pass takes two sums over the input, and one pass that writes its gradient.

Shapes: ... stands for the axes of examples and positions, such as B H W; C channels.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.models.activations import relu
from mpjax.precision.dtypes import FLOAT32, HALF, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class BatchNorm(nnx.BatchNorm):
    """Flax's batch norm (Ioffe & Szegedy, 2015, arXiv:1502.03167), with an optional ReLU.

    In training it has its own derivative: the derivatives of the single operations take one more sum over the input.
    It calls Flax's batch norm if it computes in half precision, in evaluation, with a mask, without scale or bias, with
    `axis_index_groups` or without `use_fast_variance`, or if the channels are not on the last axis.
    """

    def __call__(
        self,
        x: Float[Array, "*S C"],
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        relu: bool = False,
    ) -> Float[Array, "*S C"]:
        """Normalizes x by the mean and variance of each channel, and updates the running statistics with them.

        In evaluation it normalizes by the running statistics, which do not change.

        Args:
          x: floating [..., C].
          use_running_average: True for evaluation; None: the module's own setting, which `model.eval()` sets.
          mask: bool, broadcastable to x; False for entries that the statistics leave out. None: all count.
          relu: whether to set negative results to zero.
        """
        running = self.use_running_average if use_running_average is None else use_running_average
        scale, bias = self.scale, self.bias
        if running is not False or mask is not None or scale is None or bias is None or not self._is_plain(x):
            y = super().__call__(x, use_running_average, mask=mask)
            return nnx.relu(y) if relu else y
        x, *vectors = self.promote_dtype((x, scale[...], bias[...]), dtype=self.dtype)
        rows = [vector.reshape((1,) * (x.ndim - 1) + (-1,)) for vector in vectors]
        y, *statistics = normalize((self.epsilon, self.axis_name, relu), x, *rows)
        for statistic, new in zip((self.mean, self.var), statistics, strict=True):
            now = jax.lax.stop_gradient(new).reshape(statistic.shape)
            statistic[...] = self.momentum * statistic[...] + (1 - self.momentum) * now
        return y

    def _is_plain(self, x: jax.Array) -> bool:
        """True for a norm that `normalize` can compute: in float32 or wider, with the channels on the last axis."""
        return (
            self.axis in (-1, x.ndim - 1)
            and self.axis_index_groups is None
            and self.use_fast_variance
            and jnp.result_type(self.dtype or x.dtype) not in HALF
        )


LARGE = 2**25
"""The number of elements from which no GPU's cache holds an array, at two bytes each."""


def relu_after(norm: BatchNorm, x: Float[Array, "*S C"]) -> Float[Array, "*S C"]:
    """Computes ReLU(norm(x)), with the derivative that moves fewer bytes on a GPU.

    For an array of `LARGE` elements or more, XLA recomputes the mask of ReLU from x, which the backward pass reads
    anyway. For an array that fits into the GPU's cache, XLA would store the mask. The result of ReLU holds the same
    mask, and the next layer keeps it.
    """
    size_is_known = all(isinstance(length, int) for length in x.shape)  # not for an export with any batch size
    return norm(x, relu=True) if size_is_known and x.size >= LARGE else relu(norm(x))


def _statistics(axis_name: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes mean and variance of each channel in one pass, as E[x^2] - E[x]^2, like Flax."""
    mean, square = _means(axis_name, x, jnp.square(x))
    return mean, jnp.maximum(0.0, square - jnp.square(mean))


def _means(axis_name: Any, *arrays: jax.Array) -> list[jax.Array]:
    """Computes the mean of each channel of each array, [1, ..., 1, C]; with `axis_name`, over all its devices."""
    means = [total / _rows(x.shape) for x, total in zip(arrays, _sums(*arrays), strict=True)]
    return means if axis_name is None else list(jax.lax.pmean(jnp.stack(means), axis_name))


def _sums(*arrays: jax.Array) -> list[jax.Array]:
    """Computes the sum of each channel of each array, [1, ..., 1, C].

    A GPU adds up many rows in two stages. Here the stages are explicit, so that the arrays share the second one, which
    is a kernel of its own.
    """
    shape = arrays[0].shape
    parts = _parts(_rows(shape))
    if parts == 1:
        return [jnp.sum(x, tuple(range(x.ndim - 1)), keepdims=True) for x in arrays]
    # Under autocast, x is in half precision, and autocast does not see a cast from float32 to float32. It sees a
    # product with float32: x is cast before the reshape, as for its other uses, and its gradient is rounded once.
    # XLA drops the ones.
    ones = jnp.ones(shape[-1:], widest(FLOAT32, *(x.dtype for x in arrays))).reshape((1,) * (len(shape) - 1) + (-1,))
    partial = [jnp.sum((x * ones).reshape(parts, -1, shape[-1]), axis=1) for x in arrays]
    totals = jnp.split(jnp.sum(jnp.concatenate(partial, axis=1), axis=0), len(arrays))
    return [total.reshape((1,) * (len(shape) - 1) + (-1,)) for total in totals]


def _spread(shape: tuple[int, ...], *vectors: jax.Array) -> list[jax.Array]:
    """Broadcasts vectors [1, ..., 1, C] to a shape, in two steps: their transposes are the two stages of `_sums`."""
    parts = _parts(_rows(shape))
    if parts == 1:
        return [jnp.broadcast_to(vector, shape) for vector in vectors]
    together = jnp.concatenate([vector.reshape(1, -1) for vector in vectors], axis=1)
    partial = jnp.split(jnp.broadcast_to(together, (parts, together.size)), len(vectors), axis=1)
    whole = parts, _rows(shape) // parts, shape[-1]
    return [jnp.broadcast_to(x[:, None], whole).reshape(shape) for x in partial]


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


MANY = 2**13
"""The number of rows from which a GPU adds in two stages."""


def _parts(rows: int) -> int:
    """The number of equal parts that `_sums` divides the rows into for its first stage.

    It is the largest power of two that divides `rows` and is at most their square root. It is 1, for a single stage,
    below `MANY` rows and for an odd number of rows.
    """
    return 1 if rows < MANY else min(rows & -rows, 2 ** (math.isqrt(rows).bit_length() - 1))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def normalize(how: tuple, x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple:
    """Normalizes x by the mean and variance of each channel, with a JVP rule of its own; all results have gradients.

    Args:
      how: `(epsilon, axis_name, relu)`: a number that is added to the variance, the mapped axes over whose devices the
        statistics are averaged (or None), and whether to apply ReLU to the result.
      x: float32 or wider [..., C].
      scale: the channels' factors, [1, ..., 1, C].
      bias: the channels' offsets, [1, ..., 1, C].

    Returns:
      The normalized x, and mean and variance of each channel, [1, ..., 1, C].
    """
    epsilon, axis_name, relu = how
    mean, variance = _statistics(axis_name, x)
    y = (x - mean) * (jax.lax.rsqrt(variance + epsilon) * scale) + bias
    return jnp.maximum(y, 0) if relu else y, mean, variance


@normalize.defjvp
def _normalize_jvp(how: tuple, primals: tuple, tangents: tuple) -> tuple:
    epsilon, axis_name, relu = how
    (x, scale, bias), (of_x, of_scale, of_bias) = primals, tangents
    mean, variance = _statistics(axis_name, x)
    centred, inverse = x - mean, jax.lax.rsqrt(variance + epsilon)
    gain = inverse * scale
    of_mean, half_of_variance = _means(axis_name, of_x, centred * of_x)
    of_gain = inverse * of_scale - gain * jnp.square(inverse) * half_of_variance
    # Mean and bias share a vector, so that the backward pass takes two sums over x, not three.
    slope, offset = _spread(x.shape, of_gain, of_bias - of_mean * gain)
    change = of_x * gain + centred * slope + offset
    y = centred * gain + bias
    if relu:
        y, change = jnp.maximum(y, 0), jnp.where(bias > -(centred * gain), change, 0)
    return (y, mean, variance), (change, of_mean, 2 * half_of_variance)
