"""Muon on the filters of convolutions, and SGD with momentum on everything else.

Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest


FILTERS, REST = "filters", "rest"

_AS_MATRIX = contrib.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
"""A filter [height, width, inputs, outputs] is a matrix of as many columns as outputs."""


def muon_and_sgd(
    filters_rate: optax.ScalarOrSchedule,
    rest_rate: optax.ScalarOrSchedule,
    *,
    momentum: float,
    rest_momentum: float,
    nesterov: bool,
    weight_decay: float,
    mask: Callable[[Any], Any],
    normalise: bool = False,
) -> optax.GradientTransformation:
    """Orthogonalizes the momentum of each convolution's filter; updates other parameters by SGD.

    The update of a filter has singular values of about 1, times sqrt(outputs / inputs) if it has more outputs, and
    times its learning rate, whatever the size of the gradient.

    Args:
      filters_rate: learning rate of filters, which are the parameters of four axes.
      rest_rate: learning rate of everything else.
      momentum: momentum coefficient of filters.
      rest_momentum: momentum coefficient of everything else.
      nesterov: whether to use Nesterov momentum in both.
      weight_decay: weight decay: of filters decoupled from the gradient, of everything else added to it.
      mask: which parameters decay, given all of them.
      normalise: whether each step scales filters to a norm of sqrt(outputs) before it adds the update; filters do not
        decay then.

    Raises:
      UsageError: in `init`, no parameter is a filter.
    """
    filters = optax.chain(
        contrib.scale_by_muon(beta=momentum, nesterov=nesterov, weight_dimension_numbers=_matrices),
        # Wider than it is high, a matrix of singular values 1 shrinks its inputs.
        optax.stateless(lambda updates, _: jax.tree.map(_scaled_by_shape, updates)),
        optax.identity() if normalise else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(filters_rate),
        optax.stateless(_to_unit_columns) if normalise else optax.identity(),
    )
    rest = optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.sgd(rest_rate, rest_momentum, nesterov=nesterov)
    )
    return optax.partition({FILTERS: filters, REST: rest}, _kinds)


def _kinds(params: Any) -> Any:
    kinds = jax.tree.map(lambda p: FILTERS if p.ndim == 4 else REST, params)
    if FILTERS not in jax.tree.leaves(kinds):
        raise UsageError(
            "--optimizer.name muon: the model has no convolution of images, whose filters it is for; write adamw or sgd"
        )
    return kinds


def _matrices(updates: Any) -> Any:
    return jax.tree.map(lambda _: _AS_MATRIX, updates)


def _to_unit_columns(updates: Any, params: Any) -> Any:
    """Adds to each update what scales its filter to a norm of sqrt(outputs), so that columns have norms of about 1."""

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        # Float32: squares of half-precision values overflow.
        wide = param.astype(widest(param.dtype, FLOAT32))
        norm = jnp.sqrt(jnp.sum(jnp.square(wide)))
        factor = jnp.where(norm > 0, math.sqrt(param.shape[-1]) / jnp.where(norm > 0, norm, 1), 1)
        return (update.astype(wide.dtype) + (factor - 1) * wide).astype(update.dtype)

    return jax.tree.map(one, updates, params)


def _scaled_by_shape(update: jax.Array) -> jax.Array:
    *inputs, outputs = update.shape
    rows = inputs[0] * inputs[1] * inputs[2]
    return update * max(1.0, outputs / rows) ** 0.5
