"""CIFAR-10 in short training, from own parts: Muon for the filters of convolutions, SGD with momentum for the rest.

    python scripts/train.py --config examples/airbench.toml

Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import mpjax


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
