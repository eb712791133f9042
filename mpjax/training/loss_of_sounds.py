"""The objective of sounds with classes."""

from typing import TYPE_CHECKING

import jax

from mpjax.training.objective import OUTPUTS, Batch, Values
from mpjax.training.objectives import Comparison, equally


if TYPE_CHECKING:  # the protocol of the function that this module returns
    from mpjax.extend import Objective


def audio_classification(compare: Comparison | None = None) -> "Objective":
    """Creates the objective of classification of sounds: the values of `compare`, and the logits as `outputs`.

    Batches hold `sound`, float32 [B, frames, bins], which the model takes as it is, and `label`, integer [B]. The
    model returns logits [B, num_classes]. `compare` is as in `mpjax.training.objectives.classification`.
    """
    compare = compare or equally()

    def objective(model, batch: Batch, key: jax.Array | None) -> Values:
        logits = model(batch["sound"])
        return {**compare(logits, batch, key), OUTPUTS: logits}

    return objective
