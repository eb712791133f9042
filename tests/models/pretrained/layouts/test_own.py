"""Our own layout takes any NNX model."""

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.models.pretrained import export_safetensors, variables_of


class Odd(nnx.Module):
    """What a model of someone else may hold: containers, shared and integer variables, a kind of its own."""

    class Codebook(nnx.Variable):
        pass

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Dict(inner=nnx.LayerNorm(2, rngs=rngs))])
        self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs)
        self.tied = nnx.Linear(2, 2, rngs=rngs)
        self.tied.kernel = self.layers[0].kernel
        self.codes = Odd.Codebook(jax.random.uniform(rngs.params(), (3,)))
        self.count = nnx.BatchStat(jax.numpy.zeros((), jax.numpy.int32))


@pytest.mark.parametrize("separator", [".", "/"])
def test_any_model_goes_out_and_comes_back(tmp_path, saved, separator):
    from safetensors.numpy import load_file

    model = Odd(nnx.Rngs(0))
    model.count.set_value(jax.numpy.asarray(7, jax.numpy.int32))
    export_safetensors(model, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    again = Odd(nnx.Rngs(1))
    mpjax.load_pretrained(again, saved({key.replace(".", separator): value for key, value in tensors.items()}))
    assert again.count.get_value() == 7
    assert again.tied.kernel is again.layers[0].kernel
    for name, variable in variables_of(model).items():
        np.testing.assert_array_equal(variables_of(again)[name].get_value(), variable.get_value(), err_msg=name)
    assert {"codes", "count", "layers.1.inner.scale", "attention.query.kernel"} < set(tensors)
