"""The objective of embeddings: each text is to be nearer to its own counterpart than to all others of the batch.

InfoNCE (van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018, arXiv:1807.03748) with
negatives in the batch (Karpukhin et al., "Dense Passage Retrieval", 2020, arXiv:2004.04906).

Shapes: B the examples of one device, N those of all devices, C candidates, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.mesh_axes import BATCH_AXES
from mpjax.models.encoder.sentence import normalized
from mpjax.precision.casting.transform import full_precision
from mpjax.training.micro_batches import in_micro_batches
from mpjax.training.objective import Batch, Values
from mpjax.training.softmax_cross_entropy import with_labels


if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32

    from mpjax.extend import Objective


TEXTS = (("tokens", "length"), ("positive", "positive_length"), ("negative", "negative_length"))
"""The fields of the texts of an example: a query, what it is to find, and perhaps what it is not to find."""


def embedding(*, temperature: float, symmetric: bool = False, micro_batches: int = 1) -> Objective:
    """Creates the objective of embeddings, of values [B] for each example, over the batch of all devices.

    Batches hold the fields of `TEXTS`, of which the last two may be missing. The model makes a vector of each text.
    `loss` is the cross entropy of the softmax over the candidates of a query, whose logits are cosines over the
    temperature: its own positive, and the positives and negatives of all examples. `accuracy` is 1 where no candidate
    is as near as its own, and `mrr` is 1 over the rank of its own, behind those that are as near. Vectors are
    normalized and compared in float32 or wider, also under autocast.

    No candidate counts that has the tokens of the query or of its positive, or is the positive of the same query: it
    would be a wrong negative.

    Args:
      temperature: what cosines are divided by.
      symmetric: whether positives also look for their queries, among the queries of all examples; the loss is the mean
        of both.
      micro_batches: the number of parts of the examples of a device whose forward and backward passes run one after
        the other (gradient caching). The loss is that of all of them together.
    """

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        count = micro_batches if key is not None else 1
        texts = [names for names in TEXTS if names[0] in batch]
        tokens, lengths = (jnp.stack([batch[names[place]] for names in texts], axis=1) for place in (0, 1))
        vectors = in_micro_batches(model, _vectors, (tokens, lengths), count)
        weight = batch.get("weight", jnp.ones(len(tokens), jnp.float32))
        marks = jnp.stack([fingerprint(tokens[:, place]) for place in range(len(texts))], axis=1)
        compare = functools.partial(_compared, temperature=temperature, symmetric=symmetric, axes=divided_axes())
        return full_precision(compare)(vectors, marks, weight)

    return objective


def _vectors(model: Any, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The vectors of several texts of each example, [B, texts, D], by one call of the model."""
    tokens, lengths = inputs
    vectors = model(tokens.reshape(-1, tokens.shape[-1]), lengths.reshape(-1))
    return vectors.reshape(*lengths.shape, vectors.shape[-1])


def divided_axes() -> tuple[str, ...]:
    """The mesh axes over which each device has examples of its own; () outside of a function of one device's."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in BATCH_AXES if not mesh.empty and axis in mesh.manual_axes)


class _Whole(NamedTuple):
    """The texts of all devices, and which of them are those of this device.

    Attributes:
      vectors: normalized, float32 or wider [N, texts, D].
      marks: the fingerprints of the texts, [N, texts, 2].
      counts: False for padding, [N].
      mine: the numbers of this device's examples, int32 [B].
    """

    vectors: jax.Array
    marks: jax.Array
    counts: jax.Array
    mine: jax.Array


def _compared(
    vectors: jax.Array, marks: jax.Array, weight: jax.Array, *, temperature: float, symmetric: bool, axes: Sequence[str]
) -> Values:
    vectors = normalized(vectors)
    mine = jnp.arange(len(vectors), dtype=jnp.int32)
    whole = _Whole(vectors, marks, weight > 0, mine)
    if axes:
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, tuple(axes), tiled=True), whole)
        whole = whole._replace(mine=mine + jax.lax.axis_index(tuple(axes)) * len(vectors))
    logits = _logits(vectors[:, 0], whole.vectors[:, 1:], temperature)
    logits = _without(logits, _wrong(whole, marks))
    losses, _ = with_labels(0.0, logits, whole.mine)
    rank = rank_of(logits, whole.mine)
    if symmetric:
        back = _logits(vectors[:, 1], whole.vectors[:, :1], temperature)
        back = _without(back, _wrong(whole, marks, backwards=True))
        losses = (losses + with_labels(0.0, back, whole.mine)[0]) / 2
    accuracy = (rank == 1).astype(losses.dtype)
    return {"loss": losses, "accuracy": accuracy, "mrr": 1 / rank.astype(losses.dtype)}


def _logits(queries: Float[Array, "B D"], candidates: Float[Array, "N K D"], temperature: float) -> Float[Array, "B C"]:
    """The cosines over the temperature of normalized vectors, first of the first text of each example."""
    rows = jnp.swapaxes(candidates, 0, 1).reshape(-1, candidates.shape[-1])
    # Tensorfloat32 would be off by 0.001 of a cosine, which a temperature of 0.01 makes a tenth.
    cosines = jax.lax.dot_general(queries, rows, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    return cosines / np.asarray(temperature, cosines.dtype)


def _wrong(whole: _Whole, marks: UInt32[Array, "B K 2"], *, backwards: bool = False) -> Bool[Array, "B C"]:
    """True for candidates that are no negatives of a query, its own positive left alone."""
    asked, found = (1, 0) if backwards else (0, 1)
    queries, positives = marks[:, asked], marks[:, found]

    def same(mine: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.all(mine[:, None] == others[None], axis=-1)

    padding = ~whole.counts[None]
    first = whole.marks[:, found]
    wrong = same(positives, first) | same(queries, first) | same(queries, whole.marks[:, asked]) | padding
    is_own = jnp.arange(len(whole.counts), dtype=jnp.int32)[None] == whole.mine[:, None]
    wrong = [wrong & ~is_own]
    for place in range(2, 2 if backwards else whole.marks.shape[1]):
        others = whole.marks[:, place]
        wrong.append(same(positives, others) | same(queries, others) | padding)
    return jnp.concatenate(wrong, axis=1)


def _without(logits: jax.Array, wrong: jax.Array) -> jax.Array:
    return jnp.where(wrong, jnp.finfo(logits.dtype).min, logits)


def rank_of(logits: Float[Array, "B C"], labels: Int[Array, " B"]) -> Int[Array, " B"]:
    """The rank of each label among the candidates, from 1; NaN and equal logits are ahead of it."""
    logits = jax.lax.stop_gradient(logits)
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=1)
    return jnp.sum(~(logits < of_label), axis=1, dtype=jnp.int32)


def fingerprint(tokens: Int[Array, "B T"]) -> UInt32[Array, "B 2"]:
    """Makes two numbers of each text, which are equal for equal tokens; others share both once in 2^64 pairs."""
    salts = np.random.default_rng(0).integers(0, 2**32, (2, tokens.shape[1]), np.uint32)
    x = tokens.astype(jnp.uint32)[:, None] ^ jnp.asarray(salts)[None]
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # the finalizer of MurmurHash3 (Appleby, 2011)
        x = (x ^ (x >> 16)) * np.uint32(factor)
    return jnp.sum(x ^ (x >> 16), axis=-1, dtype=jnp.uint32)
