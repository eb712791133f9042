"""Draws pictures of a segmentation for writers: test images next to their masks and the predicted masks."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from mpjax.commands.build import Run
from mpjax.data.example_reader import reader
from mpjax.data.fields import IGNORED
from mpjax.data.read import read_batch
from mpjax.training.mesh import put_on_devices
from mpjax.training.predict_step import make_predict_step, outputs_for
from mpjax.training.state import TrainState


Pictures = dict[str, np.ndarray]
"""Pictures, uint8 [H, W, 3], by name: `masks/37` is of example 37 of the test split."""


def pictures_of(run: Run) -> Callable[[TrainState], Pictures] | None:
    """Builds a function from an unpacked state to pictures of test examples; None if the run has no pictures.

    Only a segmentation with the task's own objective has pictures, because the predictions of other objectives are
    unknown; and only if `config.report.images`, their number, is not 0. The examples are read here, are spread evenly
    over the test split, and are the same in every call. With several processes, each must call the function.
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
        masks = np.asarray(predict(state.params, state.stats, put_on_devices(batch, everywhere)))
        rows = zip(examples.tolist(), batch["image"], batch["mask"], masks, strict=True)
        return {f"masks/{example}": side_by_side(image, mask, predicted) for example, image, mask, predicted in rows}

    return pictures


IGNORED_COLOUR = (255, 255, 255)
"""The colour of ignored pixels, distinct from the colour of every class."""

_GAP = 2  # the number of grey columns between the images
_GREY = 128


def side_by_side(image: np.ndarray, mask: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Joins the image, the mask and the predicted mask from left to right, uint8 [H, 3 W + 4, 3].

    Args:
      image: [H, W, C], either uint8, whose values stay, or floating point, whose smallest value becomes 0 and whose
        largest becomes 255. Of more than three channels, the first three are shown; of one or two, the first, in grey.
      mask: class numbers [H, W], with `IGNORED` at ignored pixels.
      predicted: class numbers [H, W].
    """
    gap = np.full((len(mask), _GAP, 3), _GREY, np.uint8)
    return np.concatenate([_visible(image), gap, coloured(mask), gap, coloured(predicted)], axis=1)


def coloured(mask: np.ndarray) -> np.ndarray:
    """Maps class numbers [H, W], from 0 to 255, to colours, uint8 [H, W, 3]; ignored pixels (255) become white.

    >>> coloured(np.array([[0, 1, 2, 255]])).tolist()
    [[[0, 0, 0], [128, 0, 0], [0, 128, 0], [255, 255, 255]]]
    """
    return _palette()[mask]


@functools.cache
def _palette() -> np.ndarray:
    """The colours of Pascal VOC, uint8 [256, 3], with `IGNORED_COLOUR`.

    Bits 0, 1 and 2 of a class number are the highest bits of red, green and blue, bits 3, 4 and 5 the next, and so on.
    So neighbouring numbers have distant colours.
    """
    numbers = np.arange(256)
    channels = [sum(((numbers >> (3 * bit + channel)) & 1) << (7 - bit) for bit in range(3)) for channel in range(3)]
    palette = np.stack(channels, axis=-1).astype(np.uint8)
    palette[IGNORED] = IGNORED_COLOUR
    return palette


def _visible(image: np.ndarray) -> np.ndarray:
    """Converts an image to uint8 [H, W, 3]: its first three channels, or the first one in grey if it has fewer.

    Values of another dtype than uint8 are scaled linearly, the smallest to 0 and the largest to 255.
    """
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = np.round((image - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return image[..., :3] if image.shape[-1] >= 3 else np.repeat(image[..., :1], 3, axis=-1)
