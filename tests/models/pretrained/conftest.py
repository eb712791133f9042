"""A model small enough to write its weights down by hand."""

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file


class Small(nnx.Module):
    """A linear layer, a batch norm and a head: seven variables."""

    def __init__(self, *, rngs):
        self.stem = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(2, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.stem(x))))


@pytest.fixture
def small():
    return Small(rngs=nnx.Rngs(0))


@pytest.fixture
def weights():
    """What fits `Small`, in mpjax's own layout."""
    return {
        "stem.kernel": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
        "stem.bias": np.array([0.5, -0.5], np.float32),
        "norm.scale": np.array([1.5, 2.5], np.float32),
        "norm.bias": np.array([0, 1], np.float32),
        "norm.mean": np.array([0.25, 0.75], np.float32),
        "norm.var": np.array([2, 4], np.float32),
        "head.kernel": np.array([[1, -1, 2, -2], [3, -3, 4, -4]], np.float32),
    }


@pytest.fixture
def saved(tmp_path):
    """Writes tensors to a file and gives its path."""

    def save(tensors, name="model.safetensors"):
        save_file({key: np.array(value, order="C") for key, value in tensors.items()}, tmp_path / name)
        return tmp_path / name

    return save
