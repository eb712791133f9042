"""Computes initial values that depend on the training images, such as a kernel that whitens patches."""

import dataclasses

import jax
import numpy as np

from mpjax.config.schema import Data
from mpjax.data.example_reader import reader
from mpjax.data.examples import Source
from mpjax.errors import UsageError
from mpjax.extend import FromImages
from mpjax.precision.calls import modules_of
from mpjax.training.setup import Task
from mpjax.training.state import Arrays, take_apart


MOST_IMAGES = 5000
MOST_VALUES = 2**24
"""Most values (pixels times channels) to read: all of 5,000 images of 32x32x3, or 111 of 224x224x3."""


def arrays_from_images(task: Task, source: Source, config: Data) -> Arrays:
    """Computes the initial values that `FromImages` modules take from the training images, by path.

    Without such a module, the result is empty, and no image is read. The images, at most `MOST_IMAGES` of at most
    `MOST_VALUES` values in total, are spread evenly over the training split and prepared without augmentation. They are
    the same in each process. The results have the dtypes of the variables that they are for.

    Raises:
      UsageError: the data has no images, or a module names a variable that it does not have or returns another shape.
    """
    modules = {path: module for path, module in modules_of(task.abstract).items() if isinstance(module, FromImages)}
    if not modules:
        return {}
    if "image" not in source.fields:
        raise UsageError(f"{next(iter(modules))} takes initial values from images, but the data has none")
    images = _images(task, source, config)
    _, params, stats = take_apart(task.abstract)
    arrays: Arrays = {}
    for path, module in modules.items():
        for name, value in module.from_images(images).items():
            full = f"{path}/{name}" if path else name
            expected = (params | stats).get(full)
            if expected is None or expected.shape != value.shape:
                raise UsageError(
                    f"{type(module).__name__}.from_images returns '{name}' {value.shape}; wanted a variable of the "
                    f"module and its shape{'' if expected is None else f' {expected.shape}'}"
                )
            arrays[full] = jax.numpy.asarray(value, expected.dtype)
    return arrays


def _images(task: Task, source: Source, config: Data) -> np.ndarray:
    """Reads training images, evenly spread, as the model receives them in evaluation, float32 [N, H, W, C]."""
    # The split is named in messages about its examples.
    read = reader(source, dataclasses.replace(config, test_split=config.train_split), training=False)
    size = read.batch([source.train[0]], numbers=[0])["image"].size
    count = max(1, min(MOST_IMAGES, len(source.train), MOST_VALUES // size))
    chosen = np.linspace(0, len(source.train) - 1, count).astype(int).tolist()
    batch = read.batch(source.train.__getitems__(chosen), numbers=chosen)
    return np.asarray(task.objective.prepare(jax.tree.map(jax.numpy.asarray, batch), None)["image"])
