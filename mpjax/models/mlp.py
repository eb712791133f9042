"""A multi-layer perceptron: the smallest network here, used in the tutorial.

Shapes: B batch, K classes; an example has any shape.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from flax import nnx


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


class MLP(nnx.Module):
    """Hidden linear layers, each followed by ReLU, and a linear layer for logits or numbers.

    Args:
      features: values per example: of a row of a table, or of an image, which is flattened.
      width: units of each hidden layer.
      depth: number of hidden layers.
      num_classes: number of outputs.
    """

    def __init__(self, features: int, width: int, depth: int, num_classes: int, *, rngs: nnx.Rngs):
        sizes = [features] + [width] * depth
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.head = nnx.Linear(sizes[-1], num_classes, rngs=rngs)

    def __call__(self, x: Float[Array, " B *S"]) -> Float[Array, "B K"]:
        """Computes the outputs of examples."""
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)
