"""The first non-finite value of a step, named."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from mpjax.diagnosis.first_fault import explain, first_fault
from mpjax.precision import apply_policy, autocast, dynamic_loss_scaling
from mpjax.training import create_state, take_apart
from mpjax.training.structure import uncast


class Chain(nnx.Module):
    """Five linear layers of width 4, each the identity."""

    def __init__(self):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(5)])
        for layer in self.layers:
            layer.kernel[...] = jnp.eye(4)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Bare(nnx.Module):
    """A parameter of its own, used in no submodule's call."""

    def __init__(self):
        self.inner = nnx.Dict(weight=nnx.Param(jnp.float32(1)))

    def __call__(self, x):
        return x * self.inner["weight"][...]


@pytest.fixture
def chain():
    model = Chain()
    apply_policy(model, "mixed_float16")
    return model


def loss_of(model):
    return jnp.mean(model(jnp.ones((2, 4))))


def test_a_healthy_step_has_no_fault(chain):
    assert first_fault(chain, loss_of) is None


def test_a_layer_that_overflows_forward_is_named(chain):
    chain.layers[2].kernel[...] = jnp.full((4, 4), 30000.0)
    fault = first_fault(chain, loss_of)
    assert (fault.path, fault.direction) == ("layers/2", "forward")
    assert fault.what == "the output of layers/2 is inf"


def test_the_first_layer_is_named_and_not_those_that_pass_it_on(chain):
    chain.layers[1].kernel[...] = jnp.full((4, 4), 30000.0)
    chain.layers[3].kernel[...] = jnp.full((4, 4), 30000.0)
    assert first_fault(chain, loss_of).path == "layers/1"


def test_a_layer_whose_gradient_overflows_is_named(chain):
    """Forward 1e-4 * 1e4 = 1; backward a cotangent of 16 grows to 160000 at the inputs of layers/1, beyond float16."""
    chain.layers[0].kernel[...] = 1e-4 * jnp.eye(4)
    chain.layers[1].kernel[...] = 1e4 * jnp.eye(4)
    fault = first_fault(chain, loss_of, scale=128.0)
    assert (fault.path, fault.direction) == ("layers/0", "backward")
    assert "is inf at a loss scale of 128" in fault.what
    assert first_fault(chain, loss_of, scale=1.0) is None


def test_the_last_layer_in_forward_order_is_the_first_in_backward(chain):
    """At a scale of 2^24 the cotangent of the logits is 2^21: every layer's gradient overflows."""
    fault = first_fault(chain, loss_of, scale=2.0**24)
    assert (fault.path, fault.direction) == ("layers/4", "backward")


def test_a_parameter_outside_of_any_call_is_found():
    fault = first_fault(Bare(), lambda model: jnp.sqrt(model(jnp.float32(0))), scale=1.0)
    assert fault.direction == "backward"
    assert "inner/weight" in fault.what


def test_a_bad_parameter_is_named_with_how_many_there_are(chain):
    chain.layers[3].bias[...] = jnp.array([0, jnp.nan, 0, 0], jnp.float32)
    fault = first_fault(chain, loss_of)
    assert (fault.path, fault.direction) == ("layers/3/bias", "parameters")
    assert fault.what == "it is nan before the step, as are 1 of 10 parameters"


def test_a_loss_that_overflows_by_itself_is_named(chain):
    fault = first_fault(chain, lambda model: loss_of(model) * jnp.float32(jnp.inf))
    assert (fault.path, fault.direction) == ("loss", "forward")
    assert fault.what == "the loss is inf, though the model's output is finite"


def test_a_pixel_that_is_nan_shows_in_the_first_layer(chain):
    fault = first_fault(chain, lambda model: jnp.mean(model(jnp.full((2, 4), jnp.nan))))
    assert (fault.path, fault.what) == ("layers/0", "the output of layers/0 is nan")


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1e9, "first bad layer: layers/2 (forward): the output of layers/2 is inf"),
        (1.0, "run again module by module, this step's values are finite: the overflow is in the update or the batch"),
    ],
)
def test_a_state_and_a_batch_are_explained_in_a_sentence(chain, factor, says):
    chain.layers[2].kernel[...] = factor * jnp.eye(4)
    structure, params, stats = take_apart(chain)
    state = create_state(params, stats, dynamic_loss_scaling(optax.sgd(0.1), initial_scale=1.0))

    def loss(model, batch, key):
        return jnp.mean(model(batch["image"])), {}

    assert explain(structure, loss, uncast, 0, state, {"image": jnp.ones((2, 4))}) == says


def test_looking_leaves_the_model_as_it_was(chain):
    before = jax.tree.leaves(nnx.state(chain))
    kind = type(chain.layers[0])
    first_fault(chain, loss_of)
    assert type(chain.layers[0]) is kind
    assert all(a is b or (a == b).all() for a, b in zip(before, jax.tree.leaves(nnx.state(chain)), strict=True))


# Autocast

AUTOCAST = functools.partial(autocast, policy="mixed_float16")


@pytest.fixture
def plain():
    """The chain without a policy: the casts are around it."""
    return Chain()


def test_under_autocast_a_healthy_step_has_no_fault(plain):
    assert first_fault(plain, loss_of, scale=2.0**15, cast=AUTOCAST) is None


def test_under_autocast_the_first_layer_that_overflows_forward_is_named(plain):
    for layer in (2, 3):
        plain.layers[layer].kernel[...] = jnp.full((4, 4), 30000.0)
    fault = first_fault(plain, loss_of, cast=AUTOCAST)
    assert fault == ("layers/2", "forward", "the output of layers/2 is inf")
    assert first_fault(plain, loss_of) is None  # float32 holds it


def test_under_autocast_a_layer_whose_gradient_overflows_is_named(plain):
    plain.layers[0].kernel[...] = 1e-4 * jnp.eye(4)
    plain.layers[1].kernel[...] = 1e4 * jnp.eye(4)
    fault = first_fault(plain, loss_of, scale=128.0, cast=AUTOCAST)
    assert (fault.path, fault.direction) == ("layers/0", "backward")
    assert "is inf at a loss scale of 128" in fault.what
    assert first_fault(plain, loss_of, scale=1.0, cast=AUTOCAST) is None


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1e9, "first bad layer: layers/2 (forward): the output of layers/2 is inf"),
        (1.0, "run again module by module, this step's values are finite: the overflow is in the update or the batch"),
    ],
)
def test_under_autocast_a_state_and_a_batch_are_explained_in_a_sentence(plain, factor, says):
    plain.layers[2].kernel[...] = factor * jnp.eye(4)
    structure, params, stats = take_apart(plain)
    state = create_state(params, stats, dynamic_loss_scaling(optax.sgd(0.1), initial_scale=1.0))

    def loss(model, batch, key):
        return jnp.mean(model(batch["image"])), {}

    assert explain(structure, loss, AUTOCAST, 0, state, {"image": jnp.ones((2, 4))}) == says
