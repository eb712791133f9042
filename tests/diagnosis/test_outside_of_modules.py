"""A loss in half precision outside of all modules, which no rule reaches: found, and told how to be mended."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.diagnosis import diagnose, diagnose_function


HALF_OUTPUT = "params=float32,compute=float16,output=float16"


class Net(nnx.Module):
    """[B, features] -> logits [B, features]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.first(x)))


def dice_loss(logits, masks):
    """In the dtype of the logits; its sums pass 65,504 where there are many pixels."""
    p, masks = nnx.sigmoid(logits), masks.astype(logits.dtype)
    return 1 - 2 * jnp.sum(p * masks) / (jnp.sum(p * p) + jnp.sum(masks * masks))


def in_its_dtype(model, batch):
    return dice_loss(model(batch["x"]), batch["y"])


def in_float16(model, batch):
    return dice_loss(model(batch["x"]).astype(jnp.float16), batch["y"])


def in_a_scope(model, batch):
    with jax.named_scope("dice"):
        return dice_loss(model(batch["x"]), batch["y"])


def in_float32(model, batch):
    return dice_loss(model(batch["x"]).astype(jnp.float32), batch["y"])


@pytest.fixture
def batch():
    """262,144 pixels, a quarter of the masks at 0.5: sums of squares pass 65,504, twice the overlap does not."""
    x = jax.random.normal(jax.random.key(0), (2**16, 4))
    return {"x": x, "y": jnp.tile(jnp.array([0.0, 0.0, 0.0, 0.5]), (2**16, 1))}


@pytest.fixture
def bright(batch):
    """As `batch`, with all of the masks set, so that the overlap passes 65,504 too."""
    return {**batch, "y": jnp.ones((2**16, 4))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "policy", "path"),
    [
        (in_its_dtype, HALF_OUTPUT, ""),
        (in_float16, "mixed_float16", ""),
        (in_a_scope, HALF_OUTPUT, "dice"),
    ],
)
def test_the_advice_is_to_cast_what_goes_into_it(bright, loss_fn, policy, path):
    found = diagnose(Net(rngs=nnx.Rngs(0)), loss_fn, bright, policy=policy)
    assert (found.verdict, found.path, found.direction) == ("overflow", path, "forward")
    assert (found.rules, found.verified) == ({}, False)
    (advice,) = found.advice
    assert found.source in advice
    assert ".astype(jnp.float32)" in advice
    assert "With all of it in float32 the step is healthy (emulated)." in advice


@pytest.mark.slow
def test_the_advice_is_right(bright):
    assert diagnose(Net(rngs=nnx.Rngs(0)), in_float32, bright, policy=HALF_OUTPUT).verdict == "healthy"


@pytest.mark.slow
def test_what_is_no_fault_of_the_loss_is_not_said_to_be(batch):
    def loss_fn(model, batch):
        return jnp.sum(nnx.sigmoid(model(1e5 * batch["x"])).astype(jnp.float32))  # too large for the first layer

    found = diagnose(Net(rngs=nnx.Rngs(0)), loss_fn, batch, policy="mixed_float16;first=float16")
    assert not any("outside of all modules" in line for line in found.advice)


@pytest.mark.slow
def test_an_overflow_that_a_division_takes_back_is_still_one(batch):
    """The sums of the denominator are inf, the quotient is 0: the step is finite, and its loss is 1."""
    found = diagnose(Net(rngs=nnx.Rngs(0)), in_its_dtype, batch, policy=HALF_OUTPUT)
    assert found.loss[0] == 1.0
    assert 0.5 < found.loss[1] < 0.9
    assert (found.verdict, found.direction) == ("overflow", "forward")
    assert "its loss has a relative error of" in found.evidence


def test_an_infinity_that_harms_nothing_is_no_overflow():
    """A mask of -1e9, which float16 takes for -inf, in front of a softmax."""

    def loss_fn(params, batch):
        scores = (batch["x"] @ params).astype(jnp.float16) + batch["mask"].astype(jnp.float16)
        return jnp.mean(jax.nn.softmax(scores).astype(jnp.float32)[:, 0])

    batch = {"x": jax.random.normal(jax.random.key(0), (8, 4)), "mask": jnp.array([[0.0, 0.0, 0.0, -1e9]])}
    found = diagnose_function(loss_fn, jnp.eye(4), batch, policy="mixed_float16")
    assert found.table[0].overflow > 0
    assert found.verdict == "healthy"
