"""Classifies an image by the mean logits of several views of it: test-time augmentation.

Shapes: B batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


Predict = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]
"""`(model, images) -> logits`."""

Weighted = Sequence[tuple[float, jax.Array]]
"""Views [B, H, W, C] of the same images, each with its weight; the weights add up to 1."""


def predict_with(views: str, task: str) -> Predict:
    """Chooses the function that computes the logits of images in evaluation.

    Args:
      views: none: the images themselves. mirror: also mirrored. mirror_translate: each of the two also shifted by one
        pixel down to the right, and by one up to the left. The shifted views together have the weight of the unshifted
        ones.
      task: the task of the run.

    Raises:
      UsageError: the task is not classification, and `views` is not none.
    """
    if views == "none":
        return once
    if task != "classification":
        raise UsageError(
            f"--data.test_time_augmentation {views} averages the classes of whole images, and --task is {task}; write "
            "--data.test_time_augmentation none"
        )
    make = {"mirror": mirror, "mirror_translate": mirror_translate}[views]
    return lambda model, images: mean_logits(model, make(images))


def once(model: Callable[[jax.Array], jax.Array], images: Float[Array, "B H W C"]) -> Float[Array, "B K"]:
    """Computes the logits of the images themselves."""
    return model(images)


def mirror(images: Float[Array, "B H W C"]) -> Weighted:
    """The images, and their mirror images from left to right."""
    return [(0.5, images), (0.5, images[:, :, ::-1])]


def mirror_translate(images: Float[Array, "B H W C"]) -> Weighted:
    """The six views of Jordan (2024, arXiv:2404.00498); the border is padded by reflection."""
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = padded[:, :height, :width], padded[:, 2:, 2:]
    halves = [(0.5, images), *((0.25, view) for view in shifted)]
    return [(share * weight, view) for share, half in halves for weight, view in mirror(half)]


def mean_logits(model: Callable[[jax.Array], jax.Array], views: Weighted) -> Float[Array, "B K"]:
    """Averages the logits of all views by weight; the model runs once, on all views as one batch."""
    logits = model(jnp.concatenate([view for _, view in views]))
    dtype = widest(logits.dtype, FLOAT32)
    per_view = jnp.split(logits.astype(dtype), len(views))
    return jnp.sum(jnp.stack([weight * x for (weight, _), x in zip(views, per_view, strict=True)]), axis=0)
