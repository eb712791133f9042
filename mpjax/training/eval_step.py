"""The evaluation step: sums over each batch, whose totals give the exact metrics of a whole set."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.training.batch_shards import BatchShards, batch_shards_of
from mpjax.training.layout import Layout
from mpjax.training.objective import Batch, Values, means
from mpjax.training.state import Arrays, Structure, uncast


BATCHES_AHEAD = 4
"""Largest number of batches on the device, including the one in evaluation."""


def make_eval_step(
    structure: Structure,
    measure: Callable,
    *,
    cast: Callable[[Callable], Callable] = uncast,
    layout: Layout | None = None,
) -> Callable[[Arrays, Arrays, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """Builds the jit-compiled evaluation step, which computes under the model's policy and changes no state.

    Args:
      structure: the model taken apart, with its policy applied.
      measure: `(model, batch) -> values` by name, float32 [B, ...] each, or a pytree of such arrays such as a `Mean`;
        the model is in evaluation mode.
      cast: as for `make_train_step`.
      layout: as for `make_train_step`.

    Returns:
      `(params, stats, batch) -> sums`, float32 [...] by name: each array summed over the examples of all devices,
      weighted by the batch's `weight` ([B], 0 for padding, else 1; all 1 if absent), and `count`, the sum of the
      weights. Values of padding do not count, even if they are NaN.
    """

    shards, values_of = in_evaluation(structure, measure, cast=cast, layout=layout)

    @jax.jit
    @shards.sums
    def eval_step(params: Arrays, stats: Arrays, batch):
        return weighted_sums(values_of(params, stats, batch), batch)

    return eval_step


def weighted_sums(values: Values, batch: Batch) -> dict[str, Any]:
    """Sums each value [B, ...] over the examples, times the batch's `weight` [B] (all 1 if absent).

    A value may be a pytree of arrays. Values of weight 0 do not count, even if they are NaN. The result also has
    `count`, the sum of the weights.
    """
    size = jax.tree.leaves(values)[0].shape[0]
    weight = batch.get("weight", jnp.ones(size, jnp.float32))

    def total(value: jax.Array) -> jax.Array:
        # jnp.where, because a padding example may be NaN and 0 * NaN is NaN.
        weights = weight.reshape(size, *[1] * (value.ndim - 1))
        return jnp.sum(jnp.where(weights > 0, value * weights, 0), axis=0)

    return jax.tree.map(total, dict(values)) | {"count": jnp.sum(weight)}


def in_evaluation(
    structure: Structure, function: Callable, *, cast: Callable[[Callable], Callable], layout: Layout | None
) -> tuple[BatchShards, Callable[[Arrays, Arrays, Any], Any]]:
    """Builds `(params, stats, batch) -> function(model, batch)`, with the model in evaluation mode.

    The function takes one device's examples. Returns it after the `BatchShards` of the layout, whose methods `sums` and
    `per_example` wrap it for the batch of all devices. `cast` and `layout` are as for `make_train_step`.
    """
    # Parameters are gathered in their own dtypes: a moving average is wider than its parameter, and evaluation may use
    # more parameters than training.
    shards = batch_shards_of(layout and dataclasses.replace(layout, travels={}, given={}))

    @cast
    def of_shard(params: Arrays, stats: Arrays, batch):
        model = structure.assemble(params, stats)
        model.eval()
        shards.adapt(model)
        return function(model, batch)

    return shards, of_shard


def evaluate(
    eval_step: Callable, params: Arrays, stats: Arrays, batches: Iterable, conclude: Callable = means
) -> dict[str, float]:
    """Computes the metrics of all examples of `batches`, by name.

    Args:
      eval_step: the step from `make_eval_step`.
      params: parameters by path.
      stats: statistics by path.
      batches: at least one batch, on the host or on the device; at most `BATCHES_AHEAD` of them are on the device at a
        time.
      conclude: maps the sums over all examples, added in float64 on the host, to metrics; by default `means`, which
        divides an array by `count`, and lets a `Mean` divide by its own weights.
    """
    sums: list = []
    for batch in batches:
        sums.append(eval_step(params, stats, batch))
        # Without the wait the host runs ahead, and the whole set accumulates in device memory.
        if len(sums) >= BATCHES_AHEAD:
            jax.block_until_ready(sums[-BATCHES_AHEAD])

    def total(*arrays: np.ndarray) -> Any:
        return sum(np.asarray(x, np.float64) for x in arrays)

    return conclude(jax.tree.map(total, *jax.device_get(sums)))
