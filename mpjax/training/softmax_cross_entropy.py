"""The softmax cross entropy with labels, exact and in float32, for vocabularies whose logits fill a GPU's memory.

In shapes, ... are the labelled positions, such as B, H, W or T, and K are the classes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Bool, Float, Int


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_labels(
    smoothing: float, logits: Float[Array, "*S K"], labels: Int[Array, "*S"]
) -> tuple[Float[Array, "*S"], Bool[Array, "*S"]]:
    """Computes each position's cross entropy, and True where `predicted` is its label, in one pass over the logits.

    Logits are cast to float32, or keep a wider dtype, which the loss has too. `smoothing` is the fraction of the target
    that is spread evenly over all classes. Where the label is outside [0, K), the loss is NaN and the bool is False. It
    is also False where the largest logit is not finite; of equal logits, the first is the prediction.

    Labels are compared with an iota: a gather of a logit and the scatter of its gradient would make XLA write all
    logits to memory once more.
    """
    logits, labels = as_float32(logits), labels.astype(jnp.int32)
    return _Row.of(logits, labels).loss_and_hit(smoothing, labels, logits.shape[-1])


@with_labels.defjvp
def _with_labels_jvp(smoothing: float, primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """The JVP rule of `with_labels`: the derivative of the loss is the softmax of the logits minus the smoothed target.

    It is NaN where the label is no class. The bool has no derivative.
    """
    logits, labels = as_float32(primals[0]), primals[1].astype(jnp.int32)
    row = _Row.of(logits, labels)
    loss, hit = row.loss_and_hit(smoothing, labels, logits.shape[-1])
    even = smoothing / logits.shape[-1]
    target = jnp.where(_is_label(labels, logits), 1 - smoothing + even, even)
    slope = jnp.exp(logits - (row.shift + jnp.log(row.total))[..., None]) - target
    slope = jnp.where(_is_class(labels, logits.shape[-1])[..., None], slope, jnp.nan)
    tangent = jnp.sum(as_float32(tangents[0]) * slope, axis=-1)
    return (loss, hit), (tangent, np.zeros(hit.shape, jax.dtypes.float0))


def predicted(logits: Float[Array, "*S K"]) -> Int[Array, "*S"]:
    """The first class with the largest logit, int32; K, which is no class, if that is infinite or any logit is NaN."""
    # A reduction of several operands cannot be differentiated, and a class number has no gradient.
    logits, none = jax.lax.stop_gradient(as_float32(logits)), logits.shape[-1]
    operands = (logits, jnp.broadcast_to(_classes(logits), logits.shape))
    initial = (jnp.asarray(-jnp.inf, logits.dtype), jnp.int32(none))
    largest, first = jax.lax.reduce(operands, initial, _first_of_largest, (logits.ndim - 1,))
    return jnp.where(jnp.isfinite(largest), first, none)


def _first_of_largest(left: tuple, right: tuple) -> tuple[jax.Array, jax.Array]:
    """Chooses the larger of two `(logit, class)`, of equal logits the smaller class; the logit is NaN if either is."""
    is_left = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
    return jnp.maximum(left[0], right[0]), jnp.where(is_left, left[1], right[1])


class _Row(NamedTuple):
    """Sums and maxima of the logits [..., K] over the classes, from which the loss is computed.

    Attributes:
      largest: the largest logit [...].
      total: the sum of exp(logit - shift), [...].
      label_logit: the logit of the label [...]; 0 where the label is no class.
      all: the sum of the logits [...].
      first: int32 [...], the first class with the largest logit.
    """

    largest: jax.Array
    total: jax.Array
    label_logit: jax.Array
    all: jax.Array
    first: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, labels: jax.Array) -> _Row:
        return cls(*_reduced(logits, labels))

    @property
    def shift(self) -> jax.Array:
        """The largest logit, or 0 if that is not finite. Exponentials are of logits minus the shift."""
        return _finite_or_zero(self.largest)

    def loss_and_hit(self, smoothing: float, labels: jax.Array, classes: int) -> tuple[jax.Array, jax.Array]:
        """Computes the smoothed cross entropy, and True where the label is the first class with the largest logit.

        They are NaN and False where the label is no class; the bool is False, too, where the largest logit is not
        finite.
        """
        loss = jnp.log(self.total) - (1 - smoothing) * (self.label_logit - self.shift)
        if smoothing:
            loss -= smoothing * (self.all / classes - self.shift)
        is_class = _is_class(labels, classes)
        return jnp.where(is_class, loss, jnp.nan), is_class & jnp.isfinite(self.largest) & (self.first == labels)


@jax.custom_jvp
def _reduced(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Computes the fields of a `_Row` in one pass over the logits.

    The sum of exponentials is rescaled whenever a larger logit comes: Milakov and Gimelshein, "Online
    normalizer calculation for softmax", 2018 (arXiv:1805.02867), section 3.
    """
    classes = jnp.broadcast_to(_classes(logits), logits.shape)
    operands = (logits, jnp.ones_like(logits), jnp.where(_is_label(labels, logits), logits, 0), logits, classes)
    nothing = (-jnp.inf, 0, 0, 0, logits.shape[-1])
    initial = tuple(jnp.asarray(value, operand.dtype) for value, operand in zip(nothing, operands, strict=True))
    return tuple(jax.lax.reduce(operands, initial, _joined, (logits.ndim - 1,)))


def _joined(left: tuple, right: tuple) -> tuple[jax.Array, ...]:
    """Combines the fields of a `_Row` over two disjoint sets of classes into the fields over their union."""
    largest, first = _first_of_largest((left[0], left[4]), (right[0], right[4]))
    shift = _finite_or_zero(largest)
    total = left[1] * jnp.exp(left[0] - shift) + right[1] * jnp.exp(right[0] - shift)
    return largest, total, left[2] + right[2], left[3] + right[3], first


@_reduced.defjvp
def _reduced_jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    """The JVP rule of `_reduced`. The loss does not depend on the shift, which is therefore a constant."""
    logits, labels = primals
    change = tangents[0]
    row = _Row.of(logits, labels)
    total = jnp.sum(change * jnp.exp(logits - row.shift[..., None]), axis=-1)
    label_change = jnp.sum(jnp.where(_is_label(labels, logits), change, 0), axis=-1)
    integers = np.zeros(row.first.shape, jax.dtypes.float0)
    return tuple(row), (jnp.zeros_like(row.largest), total, label_change, jnp.sum(change, axis=-1), integers)


def _finite_or_zero(largest: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _is_class(labels: jax.Array, classes: int) -> jax.Array:
    return (labels >= 0) & (labels < classes)


def _is_label(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """bool [..., K]: True at the label."""
    return labels[..., None] == _classes(logits)


def _classes(logits: jax.Array) -> jax.Array:
    """The class numbers, int32 [1, ..., 1, K]."""
    return jnp.arange(logits.shape[-1], dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (-1,))


def as_float32(logits: jax.Array) -> jax.Array:
    """Casts logits to float32, or keeps a wider dtype."""
    return logits.astype(widest(logits.dtype, FLOAT32))
