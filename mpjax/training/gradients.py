"""The gradients of a batch: forward and backward pass on every device's examples, one micro-batch after the other."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.float8.history import add_gradient, is_history
from mpjax.precision.scale_state import loss_scale_state
from mpjax.precision.scaled_loss import loss_cotangent
from mpjax.training.batch_shards import BatchShards, Contribution
from mpjax.training.objective import Mean, as_mean
from mpjax.training.state import Arrays, Assembly, TrainState


def gradients_of(
    structure: Assembly,
    loss_fn: Callable,
    shards: BatchShards,
    *,
    cast: Callable[[Callable], Callable],
    prepare: Callable,
    accumulate: int,
    frozen: Collection[str],
) -> Callable[[TrainState, jax.Array, Any], tuple[Arrays, Contribution]]:
    """Builds `(state, key, batch) -> (stats, contribution)`: the forward and backward pass of a whole batch.

    `stats` are the statistics after the batch. `contribution` holds the gradients of the mean loss, summed over all
    devices and micro-batches and still multiplied by the loss scale, and the `Mean` of the loss and of each metric. The
    arguments are those of `make_train_step`; `shards` divides the batch over the devices of its layout.

    The function raises UsageError during its trace if the loss is a `Mean` of more than one quotient, a value is
    neither a scalar nor a `Mean`, or the batch does not divide into `accumulate` micro-batches.
    """

    def loss_of(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        shards.adapt(model)
        loss, metrics = loss_fn(model, batch, key)
        means = {name: as_mean(value, name) for name, value in ({"loss": loss} | metrics | {"loss": loss}).items()}
        if means["loss"].total.shape:
            raise UsageError(f"loss is a Mean of shape {means['loss'].total.shape}: wanted scalars to differentiate")
        loss = means["loss"] if isinstance(loss, Mean) else loss
        return shards.loss(loss), (structure.stats_of(model), means)

    differentiated = _with_histories(cast(_of_histories(loss_of)), shards, frozen)
    if accumulate > 1:
        differentiated = _weighted(differentiated, shards)
    on_each = shards.on_each(differentiated, frozen=frozen)

    def gradients(state: TrainState, key: jax.Array, batch) -> tuple[Arrays, Contribution]:
        scaling = loss_scale_state(state.opt_state)._replace(inner_state=())

        def one(stats, key, batch):
            return on_each(scaling, state.params, stats, key, prepare(batch, key))

        whole = shards.at_once(one, state.params) if accumulate == 1 else _in_turn(one, accumulate, shards)
        return whole(shards.spread(state.stats), key, batch)

    return gradients


# Histories of float8 scales

_BESIDE = "(zero beside) "
"""Prefix of the paths of zeros that are added to the histories and differentiated together with the parameters."""


def _of_histories(loss_of: Callable) -> Callable:
    """Wraps a loss to add a zero array, passed among the parameters, to each float8 history in the statistics.

    The path of the zero array is the path of its history with the prefix `_BESIDE`. The gradient of the zeros then is
    the gradient of the history, although a statistic is not differentiated.
    """

    def with_zeros(params, stats, key, batch):
        histories = {name: stats[name] + params[_BESIDE + name] for name in filter(is_history, stats)}
        return loss_of(_parameters(params), stats | histories, key, batch)

    return with_zeros


def _with_histories(loss_of: Callable, shards: BatchShards, frozen: Collection[str]) -> Callable:
    """Builds `(scaling, params, stats, key, batch) -> (stats, contribution)`, which differentiates the loss.

    The batch holds the examples of one device. `scaling` is the state of the loss scale. The gradient of the zeros that
    `_of_histories` adds is the largest absolute gradient of each float8 layer; it is recorded in the float8 histories
    of the returned statistics, and is not among the returned gradients.
    """
    value_and_grad = shards.value_and_grad(loss_of, frozen)

    def differentiated(scaling, params, stats, key, batch):
        histories = list(filter(is_history, stats))
        zeros = {_BESIDE + name: jnp.zeros_like(stats[name]) for name in histories}
        with loss_cotangent(shards.loss(loss_scale_state(scaling).scale)):
            (_, (stats, means)), grads = value_and_grad(scaling, params | zeros, stats, key, batch)
        stats |= {name: add_gradient(stats[name], grads[_BESIDE + name]) for name in histories}
        return stats, Contribution(_parameters(grads), means)

    return differentiated


def _parameters(arrays: Arrays) -> Arrays:
    """Copies a dict by path without the zeros that `_of_histories` adds."""
    return {name: array for name, array in arrays.items() if not name.startswith(_BESIDE)}


# Micro-batches


def _weighted(differentiated: Callable, shards: BatchShards) -> Callable:
    """Wraps `differentiated` to multiply its gradients by the weight of their micro-batch, in float32 or wider.

    The weight is that of the loss's `Mean`, summed over all devices.
    """

    def weighted(scaling, params, stats, key, batch):
        stats, contribution = differentiated(scaling, params, stats, key, batch)
        weight = shards.add(contribution.means["loss"].weight)

        def times_weight(g: jax.Array) -> jax.Array:
            dtype = widest(g.dtype, FLOAT32)
            return g.astype(dtype) * weight.astype(dtype)

        return stats, Contribution(jax.tree.map(times_weight, contribution.grads), contribution.means)

    return weighted


def _in_turn(one: Callable, count: int, shards: BatchShards) -> Callable:
    """Builds `(stats, key, batch) -> (stats, contribution)`, which runs `one` on `count` micro-batches in a loop.

    Each micro-batch takes the statistics of the one before and a key of its own. The gradients, which `one` has
    multiplied by the weight of their micro-batch, are summed and divided by the sum of the weights (by 1 if it is 0).
    """

    def body(carry, micro):
        stats, total = carry
        stats, contribution = one(stats, *micro)
        return (stats, jax.tree.map(jnp.add, total, contribution)), None

    def in_turn(stats, key, batch):
        keys, batches = jax.random.split(key, count), _micro_batches(batch, count)
        _, shapes = jax.eval_shape(one, stats, keys[0], jax.tree.map(lambda x: x[0], batches))
        zeros = jax.tree.map(lambda s: jnp.full(s.shape, -0.0, s.dtype), shapes)  # -0.0 + x is x, even if x is -0.0
        (stats, contribution), _ = jax.lax.scan(body, (stats, zeros), (keys, batches))
        weight = jnp.sum(contribution.means["loss"].weight)  # over all shards
        weight = jnp.where(weight != 0, weight, 1)
        # Before the sum: in half precision, gradients times the weight of a batch would overflow.
        grads = {name: g / weight.astype(g.dtype) for name, g in contribution.grads.items()}
        return shards.together(stats, Contribution(grads, contribution.means))

    return in_turn


def _micro_batches(batch, count: int):
    """Reshapes the arrays [B, ...] of a batch to [count, B / count, ...]; UsageError if `count` does not divide B.

    Micro-batch i takes the examples i, i + count, i + 2 count and so on, so that no example changes device.
    """

    def cut(x):
        if x.shape[0] % count:
            raise UsageError(f"a batch of {x.shape[0]} examples does not divide into {count} micro-batches")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)
