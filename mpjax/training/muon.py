"""Muon on the filters of convolutions, and SGD with momentum on everything else.

Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon).
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from mpjax.errors import UsageError


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

    Raises:
      UsageError: in `init`, no parameter is a filter.
    """
    filters = optax.chain(
        contrib.scale_by_muon(beta=momentum, nesterov=nesterov, weight_dimension_numbers=_matrices),
        # Wider than it is high, a matrix of singular values 1 shrinks its inputs.
        optax.stateless(lambda updates, _: jax.tree.map(_scaled_by_shape, updates)),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(filters_rate),
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


def _scaled_by_shape(update: jax.Array) -> jax.Array:
    *inputs, outputs = update.shape
    rows = inputs[0] * inputs[1] * inputs[2]
    return update * max(1.0, outputs / rows) ** 0.5
