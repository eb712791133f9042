"""The prediction step: the outputs of the model for each example of a batch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.config.tasks import OF_TARGETS, TaskName
from mpjax.precision.policy import Policy
from mpjax.training.eval_step import in_evaluation
from mpjax.training.layout import Layout
from mpjax.training.losses import cross_entropy
from mpjax.training.objective import inputs_in
from mpjax.training.softmax_cross_entropy import as_float32, predicted
from mpjax.training.state import Arrays, Structure, uncast


def make_predict_step(
    structure: Structure,
    outputs_of: Callable,
    *,
    cast: Callable[[Callable], Callable] = uncast,
    layout: Layout | None = None,
) -> Callable[[Arrays, Arrays, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """Builds the jit-compiled prediction step, which computes under the model's policy and changes no state.

    Args:
      structure: the model taken apart, with its policy applied.
      outputs_of: `(model, batch) -> outputs`, arrays [B, ...]; the model is in evaluation mode.
      cast: as for `make_train_step`.
      layout: as for `make_train_step`.

    Returns:
      `(params, stats, batch) -> outputs`, for the batch of all devices, in the order of its examples.
    """
    # Outputs are of whole texts: all devices of `context` compute the same.
    layout = layout and dataclasses.replace(layout, context=False)
    shards, of_shard = in_evaluation(structure, outputs_of, cast=cast, layout=layout)
    return jax.jit(shards.per_example(of_shard))


def logits_for(task: TaskName, prepare: Callable, policy: Policy) -> Callable:
    """Builds the function `(model, batch) -> outputs` of a task; the outputs are as the model returns them.

    The model is called with the inputs of the task (`mpjax.config.TASKS`). Images and rows are prepared without
    augmentation and cast to the compute dtype of the policy; tokens and sounds are passed as they are. Images without
    texts give vectors [B, D] for `image_text`. Arguments as for `outputs_for`.
    """

    def logits_of(model, batch: Mapping[str, jax.Array]) -> jax.Array:
        batch = prepare(batch, None)
        inputs = inputs_in(batch, task, policy)
        return model.of_images(*inputs) if task == "image_text" and len(inputs) == 1 else model(*inputs)

    return logits_of


def outputs_for(task: TaskName, prepare: Callable, policy: Policy, *, top: int, beta: float = 0.0) -> Callable:
    """Builds the function `(model, batch) -> outputs` of a task, a dict of arrays.

    Classification outputs `classes` and `probabilities`, [B, top], the most probable first. Segmentation outputs
    `mask`, the class of each pixel, uint8 [B, H, W]. Language modelling outputs `loss` and `tokens`, both [B]: the sum
    of the losses of the first `count` predicted tokens of an example (`count` is a field of the batch; without it, all
    tokens), and the number of these tokens; for instructions, these are the tokens of answers, and
    for texts that are written from others or from sounds, those of targets. Preferences
    output `chosen` and `rejected` [B], the rewards of both. Regression outputs
    `numbers`, standardised, float32 [B, targets]; several labels output `applies`, their probabilities, float32 [B,
    labels]. Embeddings output `embedding`, float32 [B, D], of the first text, and `cosine` [B], that of both texts of a
    pair, if the batch has pairs. Images and texts output the normalized `embedding` [B, D] of the image and, if the
    batch has texts, `text` [B, D] of the text, and `cosine` [B].
    All tasks output `finite` [B], False for examples with a NaN or infinite logit; with
    next tokens, with a NaN or infinite loss of a counted token.

    Args:
      task: the task.
      prepare: as in `RunObjective`.
      policy: casts the images to its compute dtype.
      top: the number of classes to output in classification; more than there are means all.
      beta: the factor of rewards, for preferences.
    """

    logits_of = logits_for(task, prepare, policy)

    def classes(logits: jax.Array) -> Arrays:
        probabilities = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        values, numbers = jax.lax.top_k(probabilities, min(top, logits.shape[-1]))
        return {"classes": numbers, "probabilities": values, "finite": _finite(logits)}

    def classification(model, batch) -> Arrays:
        return classes(logits_of(model, batch))

    def segmentation(model, batch) -> Arrays:
        logits = logits_of(model, batch)
        return {"mask": predicted(logits).astype(jnp.uint8), "finite": _finite(logits)}

    def of_tokens(model, batch) -> Arrays:
        inputs, following, counted = _predicted_tokens(task, batch)
        losses = cross_entropy(logits_of(model, inputs), following)
        losses = jnp.where(counted, losses, jnp.zeros_like(losses))
        count = jnp.sum(counted.astype(jnp.int32), axis=1)
        return {"loss": jnp.sum(losses, axis=1), "tokens": count, "finite": _finite(losses)}

    def preference(model, batch) -> Arrays:
        from mpjax.training.dpo import rewards  # local, like all imports that few runs need

        chosen, rejected = rewards(model, batch, beta=beta)
        return {"chosen": chosen, "rejected": rejected, "finite": jnp.isfinite(chosen - rejected)}

    def regression(model, batch) -> Arrays:
        numbers = as_float32(logits_of(model, batch))
        return {"numbers": numbers, "finite": _finite(numbers)}

    def multilabel(model, batch) -> Arrays:
        logits = as_float32(logits_of(model, batch))
        return {"applies": jax.nn.sigmoid(logits), "finite": _finite(logits)}

    def embedding(model, batch) -> Arrays:
        from mpjax.models.encoder.sentence import normalized  # local, like all imports that few runs need

        vectors = as_float32(logits_of(model, batch))
        outputs = {"embedding": vectors, "finite": _finite(vectors)}
        if "positive" in batch:  # of an example of a split
            others = as_float32(logits_of(model, {"tokens": batch["positive"], "length": batch["positive_length"]}))
            outputs["cosine"] = jnp.sum(normalized(vectors) * normalized(others), axis=1)
            outputs["finite"] &= _finite(others)
        return outputs

    def image_text(model, batch) -> Arrays:
        from mpjax.models.encoder.sentence import normalized

        vectors = normalized(as_float32(logits_of(model, batch)))
        if vectors.ndim == 2:  # of an image alone
            return {"embedding": vectors, "finite": _finite(vectors)}
        cosine = jnp.sum(vectors[:, 0] * vectors[:, 1], axis=-1)
        return {"embedding": vectors[:, 0], "text": vectors[:, 1], "cosine": cosine, "finite": _finite(vectors)}

    outputs: Mapping[TaskName, Callable] = {
        "classification": classification,
        "text_classification": classification,
        "segmentation": segmentation,
        "language_modeling": of_tokens,
        "instructions": of_tokens,
        "preference": preference,
        "regression": regression,
        "multilabel": multilabel,
        "embedding": embedding,
        "text_to_text": of_tokens,
        "transcription": of_tokens,
        "audio_classification": classification,
        "image_text": image_text,
    }
    return outputs[task]


def _predicted_tokens(task: TaskName, batch: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Any, Any]:
    """The inputs of a model that predicts tokens, the tokens, int32 [B, T], and whether each counts, bool [B, T]."""
    if task in OF_TARGETS:
        following = batch["target_tokens"]
        counted = batch["answers"] if "answers" in batch else _first(following, batch["target_length"])
        return dict(batch), following, counted
    tokens, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    if "answers" in batch:
        counted = batch["answers"][:, 1:]
    else:
        counted = _first(following, batch.get("count", jnp.full(len(tokens), tokens.shape[1], jnp.int32)))
    return {"tokens": tokens}, following, counted


def _first(tokens: jax.Array, count: jax.Array) -> jax.Array:
    """True for the first `count` [B] tokens of each row, bool [B, T]."""
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < count[:, None]


def _finite(values: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(values), axis=tuple(range(1, values.ndim)))
