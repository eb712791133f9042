"""Faults of products in float8: found, located and repaired, and none seen where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.precision.float8 import HISTORY


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Dict(layer=nnx.Linear(64, 64, rngs=rngs)) for _ in range(3)])

    def __call__(self, x, around=lambda layer, x, number: layer(x)):
        for number, block in enumerate(self.blocks):
            x = x + jnp.tanh(around(block["layer"], x, number))
        return x


def batch():
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=(8, 64)), jnp.float32) for _ in range(2))


def loss_of(around=lambda layer, x, number: layer(x)):
    def loss(model, batch):
        x, y = batch
        return jnp.mean(jnp.square(model(x, around).astype(jnp.float32) - y))

    return loss


def diagnose(model, loss=None, policy="mixed_float8"):
    return mpjax.diagnose(model, loss or loss_of(), batch(), policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_mxfp8", "mixed_float8_delayed"])
def test_a_healthy_step_is_healthy_and_has_its_noise_in_decibels(policy):
    found = diagnose(Net(nnx.Rngs(0)), policy=policy)
    assert found.verdict == "healthy"
    noise = {(row.path, row.direction): row.sqnr for row in found.table if row.sqnr is not None}
    assert {path for path, _ in noise} == {f"blocks/{number}/layer" for number in range(3)}
    # Rounding to 3 bits of mantissa: a relative error of 2^-4 at most; to 2 bits, of 2^-3.
    assert all(24 < decibels < 40 for decibels in noise.values())
    assert "SQNR dB" in str(found)


@pytest.mark.slow
def test_an_outlier_weight_beside_which_others_underflow_is_taken_out_of_float8():
    model = Net(nnx.Rngs(0))
    kernel = model.blocks[1]["layer"].kernel
    kernel[...] = (kernel[...] * 1e-2).at[0, 0].set(3e4)
    found = diagnose(
        model, loss_of(lambda layer, x, number: 30 * layer(x.at[:, 0].set(0)) if number == 1 else layer(x))
    )
    assert (found.verdict, found.path, found.rules) == ("underflow", "blocks/1/layer", {"blocks/1/layer": "bfloat16"})
    assert found.verified
    # A third of the FLOPs leaves float8, and none of it is in float32.
    assert found.advice == (
        'Keep out of float8: "blocks/1/layer" = "bfloat16" (33.3% of the FLOPs, verified by running).',
    )
    assert found.float32_flops == 0.0


@pytest.mark.slow
def test_gradients_that_an_outlier_row_flushes_are_found():
    def around(layer, x, number):
        if number != 1:
            return layer(x)
        sizes = jnp.full((8, 1), 1e-7).at[0].set(1e6)
        return layer(x * sizes) / sizes

    found = diagnose(Net(nnx.Rngs(0)), loss_of(around))
    assert (found.verdict, found.path, found.rules) == ("underflow", "blocks/1/layer", {"blocks/1/layer": "bfloat16"})
    assert found.verified


@pytest.mark.slow
def test_values_beyond_a_history_saturate_and_are_found():
    model = Net(nnx.Rngs(0))
    mpjax.apply_policy(model, "mixed_float8_delayed")
    history = getattr(model.blocks[2]["layer"], HISTORY)
    history[...] = history[...].at[0].set(1e-3).at[1].set(1.0)
    found = diagnose(model, policy="mixed_float8_delayed")
    assert (found.verdict, found.operation) == ("overflow", "saturation")
    assert found.rules == {"blocks/2/layer": "bfloat16"}
    assert "beyond the largest of the history" in found.evidence


@pytest.mark.slow
def test_what_bfloat16_loses_too_is_kept_in_float32():
    model = Net(nnx.Rngs(0))

    def around(layer, x, number):
        return (layer(x + 1000) - layer(jnp.full_like(x, 1000))) * 3 if number == 1 else layer(x)

    found = diagnose(model, loss_of(around))
    assert (found.verdict, found.rules) == ("rounding", {"blocks/1/layer": "float32"})
    assert found.verified
