"""A multi-layer perceptron: the smallest network here, used in the tutorial."""

import itertools

import jax
from flax import nnx


class MLP(nnx.Module):
    """Hidden linear layers, each followed by ReLU, and a linear classifier.

    Args:
      features: values per example; images are flattened.
      width: units of each hidden layer.
      depth: number of hidden layers.
      num_classes: number of logits.
    """

    def __init__(self, features: int, width: int, depth: int, num_classes: int, *, rngs: nnx.Rngs):
        sizes = [features] + [width] * depth
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.head = nnx.Linear(sizes[-1], num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes logits [B, num_classes] from examples [B, ...]."""
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)
