"""The load-balancing loss of mixtures of experts: small if all experts of a batch are used alike.

Fedus et al., "Switch Transformers", 2022 (arXiv:2101.03961), equations 4 to 6, over all layers together, as in
transformers. The share of tokens that chose an expert has no gradient, so the loss is a mean over tokens, and shards of
a batch add up to that of the batch.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax.mesh_axes import LOSS_AXES
from mpjax.models.decoder.experts import no_load
from mpjax.training.objective import Mean


def features_and_balance(model: Any, tokens: jax.Array, counted: jax.Array) -> tuple[jax.Array, Mean]:
    """Computes the features of tokens, and the load-balancing loss as a `Mean` over counted tokens, each [1].

    The loss is E times the sum over the E experts of f p: f is the share of tokens and layers that chose the expert,
    of all devices' tokens and of one micro-batch; p is the mean probability of the expert. All of it is in float32. It
    is K, the number of experts of a token, if all are used alike.

    Args:
      model: a decoder with experts.
      tokens: int32 [B, T].
      counted: bool [B, T], the tokens that count.
    """
    experts = model.settings.experts
    features, load = model.features_and_load(tokens, no_load(counted, experts.count))
    weight = jnp.sum(load.counted)
    uses, number = _over_devices((load.uses, weight))
    shares = uses / jnp.maximum(number * load.layers, 1)
    total = experts.count * jnp.sum(jax.lax.stop_gradient(shares) * load.chances / load.layers)
    return features, Mean(total[None], weight[None])


def _over_devices(sums: Any) -> Any:
    """Adds up sums of the devices' examples, inside `jax.shard_map`; outside, there are no others."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in LOSS_AXES if axis in manual)
    return jax.lax.psum(sums, axes) if axes else sums
