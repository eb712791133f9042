"""The objective of images and their texts: each is to be nearer to its counterpart than to all others of the batch.

The softmax loss of CLIP (Radford et al., 2021, arXiv:2103.00020, figure 3), or, if the model adds a bias to its logits,
the sigmoid loss of SigLIP (Zhai et al., 2023, arXiv:2303.15343, section 3.2).

Shapes: B the examples of one device, N those of all devices, E features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.models.encoder.sentence import normalized
from mpjax.precision.casting.transform import full_precision
from mpjax.precision.policy import Policy
from mpjax.training.contrastive import divided_axes, rank_of
from mpjax.training.micro_batches import in_micro_batches
from mpjax.training.objective import Batch, Values
from mpjax.training.softmax_cross_entropy import with_labels


if TYPE_CHECKING:
    from mpjax.extend import Objective


def image_text(policy: Policy, *, micro_batches: int = 1) -> Objective:
    """Creates the objective of images and texts, of values [B] for each example, over the batch of all devices.

    Batches hold `image`, `tokens` and `length`. `model(images, tokens, lengths)` makes the vectors [B, 2, E] of both,
    and `model.temperature(cosines)` the logits. `loss` is, for a `temperature` without a `bias`, the mean of two cross
    entropies: of an image with the texts of all examples, and of a text with all images; with a bias, the sum of the
    sigmoid losses of a text with all images. `image_to_text` and `text_to_image` are 1 where no other candidate of the
    batch is as near as its own: recalls at 1. All of it is in float32 or wider, also under autocast.

    Args:
      policy: the policy whose compute dtype images are cast to.
      micro_batches: the number of parts of the examples of a device whose forward and backward passes run one after
        the other (gradient caching). The loss is that of all of them together.
    """

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        inputs = policy.cast_to_compute(batch["image"]), batch["tokens"], batch["length"]
        vectors = in_micro_batches(model, _vectors, inputs, micro_batches if key is not None else 1)
        weight = batch.get("weight", jnp.ones(len(vectors), jnp.float32))
        compare = functools.partial(_compared, axes=divided_axes())
        return full_precision(compare)(vectors, weight, model.temperature)

    return objective


def _vectors(model: Any, inputs: tuple[jax.Array, ...]) -> jax.Array:
    return model(*inputs)


def _compared(vectors: jax.Array, weight: jax.Array, temperature: Any, *, axes: Sequence[str]) -> Values:
    vectors = normalized(vectors)
    own = jnp.arange(len(vectors), dtype=jnp.int32)
    whole, counts = vectors, weight > 0
    if axes:
        whole, counts = (jax.lax.all_gather(x, tuple(axes), tiled=True) for x in (whole, counts))
        own = own + jax.lax.axis_index(tuple(axes)) * len(vectors)
    to_texts = temperature(_cosines(vectors[:, 0], whole[:, 1]))
    to_images = temperature(_cosines(vectors[:, 1], whole[:, 0]))
    if temperature.bias is None:
        losses = [with_labels(0.0, _without(logits, counts), own)[0] for logits in (to_texts, to_images)]
        loss = (losses[0] + losses[1]) / 2
    else:
        is_own = jnp.arange(len(counts), dtype=jnp.int32)[None] == own[:, None]
        pairs = jax.nn.softplus(jnp.where(is_own, -to_images, to_images))
        loss = jnp.sum(jnp.where(counts[None], pairs, jnp.zeros_like(pairs)), axis=1)
    recalls = ((rank_of(_without(logits, counts), own) == 1).astype(loss.dtype) for logits in (to_texts, to_images))
    return {"loss": loss, **dict(zip(("image_to_text", "text_to_image"), recalls, strict=True))}


def _cosines(mine: jax.Array, others: jax.Array) -> jax.Array:
    """The cosines [B, N] of normalized vectors [B, E] and [N, E]."""
    # Tensorfloat32 would be off by 0.001 of a cosine, which a temperature of 0.01 makes a tenth.
    return jax.lax.dot_general(mine, others, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _without(logits: jax.Array, counts: jax.Array) -> jax.Array:
    """Makes padding, which other sizes of batches have, no candidate."""
    return jnp.where(counts[None], logits, jnp.finfo(logits.dtype).min)
