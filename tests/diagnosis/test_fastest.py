"""The policy that leaves most to half precision within a tolerance."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import fastest_policy, fastest_policy_of_function
from mpjax.errors import UsageError


class Peak(nnx.Module):
    """Three layers; the second multiplies by `factor` and divides again, so that it passes 65504."""

    def __init__(self, factor: float):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.peak = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)
        self.factor = factor

    def __call__(self, x):
        x = self.peak(nnx.relu(self.first(x)) * self.factor)
        return self.head(x / self.factor)


@pytest.fixture
def batch():
    return {"x": jax.random.normal(jax.random.key(1), (8, 16)), "y": jnp.arange(8) % 4}


def tried(found):
    return [(candidate.preset, candidate.within) for candidate in found.tried]


def test_a_healthy_model_takes_half_precision_for_its_parameters_too(networks, batch):
    found = fastest_policy(Peak(1.0), networks.labels_loss, batch)
    assert (found.best.preset, found.best.rules, found.best.float32_flops) == ("bfloat16", {}, 0.0)
    assert tried(found) == [("bfloat16", True), ("float16", True), ("mixed_bfloat16", True), ("mixed_float16", True)]
    assert [candidate.loss_scale for candidate in found.tried] == [1, 2**15, 1, 2**15]
    # Eight bits against eleven.
    assert 1e-3 < found.tried[0].gradient_error < 2e-2
    assert 1e-4 < found.tried[1].gradient_error < 2e-3


@pytest.mark.slow
def test_where_float16_overflows_bfloat16_is_taken(networks, batch):
    found = fastest_policy(Peak(3e4), networks.labels_loss, batch)
    assert found.best.flags == "--precision.policy bfloat16"
    assert tried(found)[1] == ("float16", False)
    assert "no  float16         not finite" in str(found)
    assert json.loads(found.to_json())["tried"][1]["loss_error"] == "NaN"


@pytest.mark.slow
def test_under_a_tolerance_that_no_policy_keeps_the_fewest_products_are_left_out(networks, batch):
    found = fastest_policy(Peak(1.0), networks.labels_loss, batch, tolerance=3e-5)
    assert [within for _, within in tried(found)] == [False, False, False, False, True, True]
    assert found.best.flags == '--precision.policy mixed_bfloat16 --precision.rules "first" float32 "head" float32'
    # Forward and two gradients; the first layer's input has none.
    first, peak, head = 2 * 16 * 32, 3 * 32 * 32, 3 * 32 * 4
    assert found.best.float32_flops == pytest.approx((first + head) / (first + peak + head))
    assert found.best.loss_error <= 3e-5


@pytest.mark.slow
def test_a_policy_without_a_product_in_half_precision_is_none(networks, batch):
    found = fastest_policy(Peak(1.0), networks.labels_loss, batch, tolerance=1e-5)
    assert found.best is None
    assert str(found).startswith("fastest policy within 1e-05: only float32\n")


@pytest.mark.slow
def test_the_model_is_left_as_it_is(networks, batch):
    model = Peak(1.0)
    before = jax.tree.map(jnp.array, nnx.state(model))
    fastest_policy(model, networks.labels_loss, batch)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, before, nnx.state(model))
    )
    assert type(model) is Peak


def test_a_function_is_tried_under_autocast_alone(batch):
    def loss_fn(params, batch):
        with jax.named_scope("head"):
            logits = batch["x"] @ params["kernel"]
        return jnp.mean(jnp.square(logits))

    found = fastest_policy_of_function(loss_fn, {"kernel": jnp.full((16, 4), 0.25)}, batch)
    assert tried(found) == [("mixed_bfloat16", True), ("mixed_float16", True)]
    assert found.best.preset == "mixed_bfloat16"


def test_a_step_that_float32_does_not_survive_is_refused(networks, batch):
    with pytest.raises(UsageError, match="not finite in float32"):
        fastest_policy(Peak(float("inf")), networks.labels_loss, batch)
