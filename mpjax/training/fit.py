"""Whether a model gives what its task asks of it, found before anything is compiled or written."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.config.task import TaskName
from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32


Shapes = tuple[jax.ShapeDtypeStruct, ...]

_BATCH = 2


def check_fit(model: nnx.Module, task: TaskName, fields: Mapping[str, Any], *, name: str, dtype: Any = FLOAT32) -> None:
    """Traces the model's forward pass on a batch of two.

    Args:
      model: may be abstract.
      task: what it is to learn.
      fields: what a batch holds.
      name: what messages call the model.
      dtype: of the images it is given.

    Raises:
      UsageError: it takes other arguments, or gives logits of another shape.
    """
    inputs, wanted = _call(task, fields, dtype)
    try:
        inspect.signature(model).bind(*inputs)
    except TypeError as error:
        raise UsageError(
            f"--model.name {name} cannot be called for --task {task}: {error}; wanted {_SIGNATURES[task]}"
        ) from error
    found = nnx.eval_shape(lambda model, *inputs: model(*inputs), model, *inputs)
    shape = getattr(found, "shape", type(found).__name__)
    if shape != wanted:
        raise UsageError(
            f"--model.name {name} gives {shape} for a batch of {_BATCH}; wanted logits {wanted}: {_SIGNATURES[task]}"
        )


_SIGNATURES: Mapping[TaskName, str] = {
    "classification": "images [B, H, W, C] -> logits [B, num_classes]",
    "segmentation": "images [B, H, W, C] -> logits [B, H, W, num_classes]",
    "text_classification": "tokens [B, T], lengths [B] -> logits [B, num_classes]",
    "language_modeling": "tokens [B, T] -> logits [B, T, vocabulary]",
}


def _call(task: TaskName, fields: Mapping[str, Any], dtype: Any) -> tuple[Shapes, tuple[int, ...]]:
    """What the model is called with, and the shape of the logits that are wanted of it."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((_BATCH, *shape), dtype)

    if "tokens" in fields:
        tokens = fields["tokens"]
        if task == "language_modeling":
            return (of(tokens.length - 1),), (_BATCH, tokens.length - 1, tokens.vocabulary)
        return (of(tokens.length), of()), (_BATCH, fields["label"].num_classes)
    height, width, _ = fields["image"].shape
    images = (of(*fields["image"].shape, dtype=dtype),)
    if task == "segmentation":
        return images, (_BATCH, height, width, fields["mask"].num_classes)
    return images, (_BATCH, fields["label"].num_classes)
