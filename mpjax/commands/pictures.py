"""Pictures of a segmentation for writers: test images, their masks, and the predicted masks."""

from collections.abc import Callable

import jax
import numpy as np

from mpjax.commands.build import Run
from mpjax.data.example_reader import reader
from mpjax.data.read import read_batch
from mpjax.report.mask_pictures import side_by_side
from mpjax.training import TrainState
from mpjax.training.mesh import place
from mpjax.training.predict_step import make_predict_step, outputs_for


Pictures = dict[str, np.ndarray]
"""Pictures, uint8 [H, W, 3], by name: `masks/37` is of example 37 of the test split."""


def pictures_of(run: Run) -> Callable[[TrainState], Pictures] | None:
    """Builds a function from an unpacked state to `config.report.images` pictures; None if the run has none.

    Only a segmentation with the task's own objective has pictures, because the predictions of other objectives are
    unknown. The examples are spread evenly over the test split, and are the same in every call. With several processes,
    each must call the function.
    """
    config = run.config
    count = min(config.report.images, len(run.source.test))
    if config.task != "segmentation" or config.training.objective or not count:
        return None
    examples = np.arange(count) * len(run.source.test) // count
    batch = read_batch(run.source.test, examples, reader(run.source, config.data, training=False))
    outputs_of = outputs_for("segmentation", run.task.objective.prepare, run.plan.module_policy, top=1)
    step = make_predict_step(run.task.structure, outputs_of, cast=run.task.cast, layout=run.layout)
    # Each process reads all of these few examples, and gets all of their masks.
    everywhere = run.layout.replicated
    predict = jax.jit(lambda params, stats, placed: step(params, stats, placed)["mask"], out_shardings=everywhere)

    def pictures(state: TrainState) -> Pictures:
        masks = np.asarray(predict(state.params, state.stats, place(batch, everywhere)))
        parts_of_each = zip(examples.tolist(), batch["image"], batch["mask"], masks, strict=True)
        return {f"masks/{example}": side_by_side(*parts) for example, *parts in parts_of_each}

    return pictures
