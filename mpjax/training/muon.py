"""Muon for the filters of convolutions, and SGD with momentum for all other parameters.

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
"""A filter [height, width, inputs, outputs] is a matrix with one column per output."""


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
    """Builds the rule that orthogonalizes the momentum of each filter and updates all other parameters by SGD.

    The update of a filter has singular values of about 1, whatever the size of the gradient. They are multiplied by the
    learning rate, and by sqrt(outputs / inputs) if the filter has more outputs than inputs.

    Args:
      filters_rate: learning rate of filters, which are the parameters of four axes.
      rest_rate: learning rate of all other parameters.
      momentum: momentum coefficient of filters.
      rest_momentum: momentum coefficient of all other parameters.
      nesterov: whether to use Nesterov momentum in both.
      weight_decay: weight decay; decoupled from the gradient for filters, added to it for all other parameters.
      mask: maps all parameters to the flags of those that decay.
      normalise: whether each step scales filters to a norm of sqrt(outputs) before it adds the update; filters then do
        not decay.

    Raises:
      UsageError: in `init`, no parameter is a filter.
    """
    filters = optax.chain(
        contrib.scale_by_muon(beta=momentum, nesterov=nesterov, weight_dimension_numbers=_matrices),
        # A matrix that is wider than high, with singular values 1, shrinks its inputs.
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
    """Adds to each update the change that scales its filter to a norm of sqrt(outputs): columns of norm about 1."""

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
