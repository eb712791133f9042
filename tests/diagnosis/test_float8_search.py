"""The layers that can multiply in float8, by their noise and by a verified step."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import (
    WITHOUT_ROUNDING,
    Fastest,
    Float8Layers,
    Reference,
    float8_layers,
    outputs_of,
    program_of_model,
)
from mpjax.precision import get_policy


PATHS = [f"blocks/{number}/linear" for number in range(4)]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    """Four layers; inside of the layer `place` one input is `outlier` times as large, and its weights as small."""

    def __init__(self, place: int = -1, outlier: float = 1e7):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Dict(linear=nnx.Linear(64, 64, rngs=rngs)) for _ in range(4)])
        self.place, self.outlier = place, outlier
        if place >= 0:
            kernel = self.blocks[place]["linear"].kernel
            kernel[...] = kernel[...].at[3].divide(outlier)

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            given = x.at[:, 3].multiply(self.outlier) if number == self.place else x
            x = x + jnp.tanh(block["linear"](given))
        return x


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch).astype(jnp.float32)))


def found_of(model, tolerance: float = 0.05) -> Float8Layers:
    make = functools.partial(program_of_model, model, loss, jax.random.normal(jax.random.key(0), (8, 64)))
    full = make(get_policy("float32"))
    return float8_layers(make, Reference(full, outputs_of(WITHOUT_ROUNDING, full, 1.0), tolerance))


@pytest.mark.slow
def test_all_layers_of_a_healthy_step_can_be_in_float8():
    found = found_of(Net())
    assert (found.within, found.rules, found.float8_flops) == (True, {}, 1.0)
    assert sorted(layer.path for layer in found.layers) == PATHS
    for layer in found.layers:
        assert layer.float8
        assert layer.underflow < 0.05
        assert 24 < layer.sqnr < 32
        assert 30 < layer.sqnr_mxfp8 < 33
        assert 17 < layer.sqnr_nvfp4 < 23
    assert [layer.sqnr for layer in found.layers] == sorted(layer.sqnr for layer in found.layers)
    assert "float8: 4 of 4 layers: --precision.policy mixed_float8\n" in str(found)


@pytest.mark.slow
def test_a_layer_with_an_outlier_is_left_out_although_its_decibels_do_not_show_it():
    found = found_of(Net(place=2))
    first, *others = found.layers
    assert (first.path, first.float8, [each.float8 for each in others]) == ("blocks/2/linear", False, [True] * 3)
    assert (found.within, found.rules, found.float8_flops) == (True, {"blocks/2/linear": "bfloat16"}, 0.75)
    assert first.underflow > 0.9
    assert first.sqnr > 24
    assert max(each.underflow for each in others) < 0.05
    lines = str(found).splitlines()
    assert lines[0].endswith('--precision.policy mixed_float8 --precision.rules "blocks/2/linear" bfloat16')
    assert lines[3].split()[:2] == ["no", "blocks/2/linear"]


@pytest.mark.slow
def test_where_one_layer_is_too_much_none_is_proposed():
    found = found_of(Net(), tolerance=1e-6)
    assert (found.within, [layer.float8 for layer in found.layers]) == (False, [False] * 4)
    assert found.rules == dict.fromkeys((layer.path for layer in found.layers), "bfloat16")
    assert "alone in float8, the step is not within 1e-06 either" in str(found)


def test_a_model_without_such_layers_says_which_rules_decided():
    make = functools.partial(program_of_model, nnx.Linear(64, 64, rngs=nnx.Rngs(0)), loss, jnp.ones((8, 64)))
    full = make(get_policy("float32"))
    found = float8_layers(make, Reference(full, outputs_of(WITHOUT_ROUNDING, full, 1.0), 0.05))
    assert found.layers == ()
    assert str(found).startswith("float8: no layer. ")
    assert "type:first_or_last" in found.reason


def test_the_answer_is_part_of_the_fastest_policys():
    found = Fastest(None, (), 0.05, Float8Layers(reason="None is linear."))
    assert str(found) == "fastest policy within 0.05: only float32\nfloat8: no layer. None is linear."
    assert '"reason": "None is linear."' in found.to_json()
