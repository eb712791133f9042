"""The evaluation step: sums of metrics over a batch, and their exact means over a whole set."""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp

from mpjax.training.structure import Arrays, Structure, uncast


def make_eval_step(
    structure: Structure, measure: Callable, *, cast: Callable[[Callable], Callable] = uncast
) -> Callable[[Arrays, Arrays, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """The jit-compiled evaluation step, under the policy of the model; it touches no state.

    Args:
      structure: the model taken apart, its policy applied.
      measure: `(model, batch) -> values`, one float32 [B] array per metric; the model is in evaluation mode.
      cast: as for `make_train_step`.

    Returns:
      `(params, stats, batch) -> sums`, float32 scalars: each metric summed over the examples with their `weight`
      ([B], 1 or 0 for padding; all 1 if absent), and `count`, the sum of weights.
    """

    @cast
    def values_of(params: Arrays, stats: Arrays, batch) -> Arrays:
        model = structure.assemble(params, stats)
        model.eval()
        return measure(model, batch)

    @jax.jit
    def eval_step(params: Arrays, stats: Arrays, batch):
        values = values_of(params, stats, batch)
        size = next(iter(values.values())).shape[0]
        weight = batch.get("weight", jnp.ones(size, jnp.float32))
        # where, not a product: 0 * nan of a padding example would be nan.
        sums = {name: jnp.sum(jnp.where(weight > 0, value * weight, 0)) for name, value in values.items()}
        return sums | {"count": jnp.sum(weight)}

    return eval_step


def evaluate(eval_step: Callable, params: Arrays, stats: Arrays, batches: Iterable) -> dict[str, float]:
    """Means over all examples of `batches`, added up in float64 on the host after the last batch is dispatched."""
    sums = jax.device_get([eval_step(params, stats, batch) for batch in batches])
    count = sum(float(s["count"]) for s in sums)
    return {name: sum(float(s[name]) for s in sums) / count for name in sums[0] if name != "count"}
