"""Compares the probabilities that a fine-tuned language model gives to a test text with those in float32."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.commands.build import Run, model_with
from mpjax.diagnosis.log_ratios import mismatch
from mpjax.errors import is_exhausted
from mpjax.precision.modules import apply_policy
from mpjax.training.predict_step import make_predict_step
from mpjax.training.state import TrainState


def told_of_mismatch(run: Run, state: TrainState) -> str:
    """Compares the forward pass under the run's policy with float32, on the first test text; returns a line about it.

    Of a conversation, only the tokens from its first answer to its last are compared.

    One text, because the float32 logits of a batch may not fit into memory. If those of one text do not fit, the line
    says so.
    """
    batch = next(iter(run.tests))
    tokens = jnp.asarray(batch["tokens"][:1, :-1])
    unpacked, task = run.packing.unpack(state), run.task
    under_policy = make_predict_step(task.structure, lambda model, batch: model(batch["tokens"]), cast=task.cast)
    exact = model_with(run, state)
    apply_policy(exact, "float32")

    @jax.default_matmul_precision("highest")
    def in_float32(tokens):
        return nnx.jit(lambda model, tokens: model(tokens))(exact, tokens)

    try:
        compared = mismatch(
            lambda tokens: under_policy(unpacked.params, unpacked.stats, {"tokens": tokens}),
            in_float32,
            tokens,
            **_of_answers(batch),
        )
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_exhausted(error):
            raise
        return "the probabilities under the policy are not compared with float32: the logits of a text do not fit"
    low, high = compared.band
    lost = f"; {compared.not_finite} of them a probability of 0 or NaN" if compared.not_finite else ""
    return (
        f"of {compared.tokens} tokens of a test text, {compared.outside:.1%} have another probability than in float32 "
        f"(ratio outside [{low:g}, {high:g}]){lost}; ratio {compared.mean:.5f} on average, {compared.lowest:.5f} to "
        f"{compared.highest:.5f}"
    )


def _of_answers(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The arguments of `mismatch` for the first text of a batch: where its answers begin and end, if it has marks."""
    answers = np.flatnonzero(batch["answers"][0, :-1]) if "answers" in batch else np.empty(0)
    return {"prompt": max(1, int(answers[0])), "lengths": answers[-1:] + 1} if answers.any() else {}
