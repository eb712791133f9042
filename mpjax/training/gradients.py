"""The gradients of a batch: forward and backward, on every device's share, one micro-batch after the other."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.float8.history import add_gradient, is_history
from mpjax.precision.scale_state import loss_scale_state
from mpjax.precision.scaled_loss import loss_cotangent
from mpjax.training.objective import Mean, as_mean
from mpjax.training.shares import Contribution, Shares
from mpjax.training.state import Arrays, Assembly, TrainState


def gradients_of(
    structure: Assembly,
    loss_fn: Callable,
    shares: Shares,
    *,
    cast: Callable[[Callable], Callable],
    prepare: Callable,
    accumulate: int,
    frozen: Collection[str],
) -> Callable[[TrainState, jax.Array, Any], tuple[Arrays, Contribution]]:
    """Builds `(state, key, batch) -> (stats, contribution)` of a whole batch, with the gradients summed over devices.

    The gradients are still scaled, and `stats` are the statistics after the batch. The arguments are those of
    `make_train_step`; `shares` divides the batch over the devices of its layout.
    """

    def loss_of(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        shares.adapt(model)
        loss, metrics = loss_fn(model, batch, key)
        means = {name: as_mean(value, name) for name, value in ({"loss": loss} | metrics | {"loss": loss}).items()}
        if means["loss"].total.shape:
            raise UsageError(f"loss is a Mean of shape {means['loss'].total.shape}: wanted scalars to differentiate")
        loss = means["loss"] if isinstance(loss, Mean) else loss
        return shares.loss(loss), (structure.stats_of(model), means)

    differentiated = _with_histories(cast(_of_histories(loss_of)), shares, frozen)
    if accumulate > 1:
        differentiated = _weighted(differentiated, shares)
    on_each = shares.on_each(differentiated, frozen=frozen)

    def gradients(state: TrainState, key: jax.Array, batch) -> tuple[Arrays, Contribution]:
        scaling = loss_scale_state(state.opt_state)._replace(inner_state=())

        def one(stats, key, batch):
            return on_each(scaling, state.params, stats, key, prepare(batch, key))

        whole = shares.at_once(one, state.params) if accumulate == 1 else _in_turn(one, accumulate, shares)
        return whole(shares.spread(state.stats), key, batch)

    return gradients


# Histories of float8 scales

_BESIDE = "(zero beside) "
"""Prefix of the paths of zeros that are added to the histories and differentiated together with the parameters."""


def _of_histories(loss_of: Callable) -> Callable:
    """Wraps a loss to add the zeros, which it takes among the parameters, to the histories in the statistics."""

    def with_zeros(params, stats, key, batch):
        histories = {name: stats[name] + params[_BESIDE + name] for name in filter(is_history, stats)}
        return loss_of(_parameters(params), stats | histories, key, batch)

    return with_zeros


def _with_histories(loss_of: Callable, shares: Shares, frozen: Collection[str]) -> Callable:
    """Builds `(scaling, params, stats, key, batch) -> (stats, contribution)` of one share.

    It differentiates the loss, and records the gradients of the zeros, the largest gradient of each layer, in the
    histories.
    """
    value_and_grad = shares.value_and_grad(loss_of, frozen)

    def differentiated(scaling, params, stats, key, batch):
        histories = list(filter(is_history, stats))
        zeros = {_BESIDE + name: jnp.zeros_like(stats[name]) for name in histories}
        with loss_cotangent(shares.loss(loss_scale_state(scaling).scale)):
            (_, (stats, means)), grads = value_and_grad(scaling, params | zeros, stats, key, batch)
        stats |= {name: add_gradient(stats[name], grads[_BESIDE + name]) for name in histories}
        return stats, Contribution(_parameters(grads), means)

    return differentiated


def _parameters(arrays: Arrays) -> Arrays:
    """Removes the zeros of the histories."""
    return {name: array for name, array in arrays.items() if not name.startswith(_BESIDE)}


# Micro-batches


def _weighted(differentiated: Callable, shares: Shares) -> Callable:
    """Wraps `differentiated` to multiply its gradients by the weight of their micro-batch, in float32 or wider."""

    def weighted(scaling, params, stats, key, batch):
        stats, contribution = differentiated(scaling, params, stats, key, batch)
        weight = shares.add(contribution.means["loss"].weight)

        def times_weight(g: jax.Array) -> jax.Array:
            dtype = widest(g.dtype, FLOAT32)
            return g.astype(dtype) * weight.astype(dtype)

        return stats, Contribution(jax.tree.map(times_weight, contribution.grads), contribution.means)

    return weighted


def _in_turn(one: Callable, count: int, shares: Shares) -> Callable:
    """Builds `(stats, key, batch) -> (stats, contribution)` that runs `one` on `count` micro-batches in turn.

    Each takes the statistics of the one before. The gradients are averaged by the weights of the micro-batches.
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
        weight = jnp.sum(contribution.means["loss"].weight)  # over all shares
        weight = jnp.where(weight != 0, weight, 1)
        # Before the sum: in half precision, gradients times the weight of a batch would overflow.
        grads = {name: g / weight.astype(g.dtype) for name, g in contribution.grads.items()}
        return shares.together(stats, Contribution(grads, contribution.means))

    return in_turn


def _micro_batches(batch, count: int):
    """Reshapes [B, ...] to [count, B / count, ...]. Each takes every count-th example, so no example changes device.

    Raises UsageError if `count` does not divide B.
    """

    def cut(x):
        if x.shape[0] % count:
            raise UsageError(f"a batch of {x.shape[0]} examples does not divide into {count} micro-batches")
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)

    return jax.tree.map(cut, batch)
