"""A random rectangle of an image becomes noise: random erasing (Zhong et al., 2017, arXiv:1708.04896)."""

import jax
import jax.numpy as jnp

from mpjax.data.augmentation.boxes import random_boxes


def random_erasing(
    images: jax.Array,
    key: jax.Array,
    probability: float = 0.25,
    *,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 3.3),
) -> jax.Array:
    """Fills a rectangle of some images with Gaussian noise, which after normalisation looks like any pixels.

    The label of what is erased stays what it was, also that of its pixels.

    Args:
      images: floating [B, H, W, C], normalised.
      key: to draw from.
      probability: of an image to be erased.
      area: smallest and largest share of the image.
      ratio: smallest and largest height over width.

    Returns:
      Images of the same shape and dtype.
    """
    box_key, noise_key, choice_key = jax.random.split(key, 3)
    batch, height, width, _ = images.shape
    inside = random_boxes(box_key, batch, (height, width), area, ratio).contain(height, width)
    erased = inside & jax.random.bernoulli(choice_key, probability, (batch, 1, 1))
    noise = jax.random.normal(noise_key, images.shape, jnp.float32).astype(images.dtype)
    return jnp.where(erased[..., None], noise, images)
