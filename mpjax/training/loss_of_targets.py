"""The objectives of texts that are written from others, or from sounds: each next token of a target."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpjax.training.loss_of_answers import instructions
from mpjax.training.objective import Batch, Values


if TYPE_CHECKING:  # the protocol of the function that this module returns
    from mpjax.extend import Objective


def text_to_text(*, label_smoothing: float = 0.0, chunk: int = 0) -> "Objective":
    """Creates the objective of targets: `loss` and `accuracy`, each a `Mean` over the tokens of targets.

    Batches hold the sources, `tokens`, integer [B, T], and their `length` [B], and the targets, `target_tokens`,
    integer [B, U], and `target_length` [B]. The model takes sources, their lengths and targets, and returns logits
    [B, U, vocabulary] of each target token from those before it; they are the `outputs`. Padding does not count.

    Args:
      label_smoothing: the label smoothing of the training loss.
      chunk: the number of tokens whose logits exist at a time, as for `mpjax.training.objectives.language_modeling`.
    """
    of_answers = instructions(label_smoothing=label_smoothing, chunk=chunk)

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        targets = batch["target_tokens"]
        # The first token of a conversation is predicted from none: here, it is the one that the model begins with.
        tokens = jnp.concatenate([targets[:, :1], targets], axis=1)
        answers = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] <= batch["target_length"][:, None]
        answering: Any = _FromSources(model, (batch["tokens"], batch["length"], targets))
        return of_answers(answering, {"tokens": tokens, "answers": answers}, key)

    return objective


def transcription(*, label_smoothing: float = 0.0, chunk: int = 0) -> "Objective":
    """Creates the objective of the texts of sounds: `loss` and `accuracy`, each a `Mean` over the tokens that count.

    Batches hold `sound`, float32 [B, frames, bins], which the model takes as it is, `target_tokens`, integer [B, U],
    and `answers`, bool [B, U], True for the tokens of a text and its end, and False for its prompt and padding. The
    model takes sounds and targets, and returns logits [B, U, vocabulary] of each target token from those before it;
    they are the `outputs`. Arguments are those of `text_to_text`.
    """
    of_answers = instructions(label_smoothing=label_smoothing, chunk=chunk)

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        targets, answers = batch["target_tokens"], batch["answers"]
        # As in `text_to_text`: in front of the targets is the token that the model begins with.
        tokens = jnp.concatenate([targets[:, :1], targets], axis=1)
        counted = jnp.concatenate([jnp.zeros_like(answers[:, :1]), answers], axis=1)
        answering: Any = _FromSources(model, (batch["sound"], targets))
        return of_answers(answering, {"tokens": tokens, "answers": counted}, key)

    return objective


@dataclasses.dataclass(frozen=True)
class _FromSources:
    """A model of targets, called like one of a conversation: its sources and targets are `inputs`, of a batch."""

    model: Any
    inputs: tuple[jax.Array, ...]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        del tokens
        return self.model(*self.inputs)

    def features(self, tokens: jax.Array) -> jax.Array:
        del tokens
        return self.model.features(*self.inputs)

    def logits(self, features: jax.Array) -> jax.Array:
        return self.model.logits(features)
