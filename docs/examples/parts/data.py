"""Data of one's own: stripes to tell apart, made as they are read, and the same in arrays for the test.

python scripts/train.py --data.name docs/examples/parts/data.py:stripes --data.num_classes 2 --model.name mlp
"""

import numpy as np


class Stripes:
    """Images of horizontal (0) or vertical (1) stripes in noise: anything with a length and integer indices will do."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng([self.seed, index])
        label = int(rng.integers(2))
        stripes = np.zeros((8, 8), np.uint8)
        stripes[::2] = 160
        image = (stripes.T if label else stripes) + rng.integers(64, size=(8, 8), dtype=np.uint8)
        return {"image": image[..., None], "label": label}


def stripes():
    """Returns the examples to train on and those to test."""
    test = Stripes(64, seed=1)
    rows = [test[index] for index in range(len(test))]
    return Stripes(512, seed=0), {name: np.stack([row[name] for row in rows]) for name in ("image", "label")}
