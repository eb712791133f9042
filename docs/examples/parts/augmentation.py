"""An augmentation in the compiled step: brightness and contrast, drawn for each image.

python scripts/train.py --data.augment docs/examples/parts/augmentation.py:light
"""

import jax


def light(batch, key):
    """Returns the batch with float32 images [B, H, W, C] of another brightness and contrast."""
    size = (len(batch["image"]), 1, 1, 1)
    bright, contrast = jax.random.split(key)
    images = batch["image"] * jax.random.uniform(contrast, size, minval=0.8, maxval=1.2)
    return {**batch, "image": images + jax.random.uniform(bright, size, minval=-0.1, maxval=0.1)}
