"""The multi-layer perceptron, by hand."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models import MLP


def test_logits_are_those_of_the_formula():
    model = MLP(4, 3, 2, 5, rngs=nnx.Rngs(0))
    x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 2, 2, 1)
    hidden = np.asarray(x).reshape(2, 4)
    for layer in model.layers:
        hidden = np.maximum(hidden @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...]), 0)
    expected = hidden @ np.asarray(model.head.kernel[...]) + np.asarray(model.head.bias[...])
    assert len(model.layers) == 2
    np.testing.assert_allclose(model(x), expected, rtol=1e-6, atol=1e-6)
