"""Training steps with products in float8: their scaling state is skipped, shared and divided like the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mpjax.precision import apply_policy, dynamic_loss_scaling
from mpjax.training import Layout, Mean, create_state, make_mesh, make_train_step, take_apart


POLICY = "params=float32,compute=bfloat16,output=float32,products="
NAME = "layers/0/amax_history"


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs)])
        self.head = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.layers[0](x)))


def loss_fn(model, batch, key):
    squares = jnp.sum(jnp.square(model(batch["x"]) - 1), axis=1)
    return Mean(jnp.sum(squares), jnp.float32(len(squares))), {}


LAYOUTS = {
    "one device": lambda: None,
    "data": lambda: Layout(make_mesh()),
    "fsdp": lambda: Layout(make_mesh(data=1, fsdp=2), divided={"layers/0/kernel": P("fsdp")}, blocks=("layers/0",)),
}


@functools.cache
def begin(recipe="float8_delayed", layout="one device", accumulate=1):
    model = Net(nnx.Rngs(0))
    apply_policy(model, POLICY + recipe)
    structure, params, stats = take_apart(model)
    tx = dynamic_loss_scaling(optax.sgd(0.005), initial_scale=8.0)
    layout = LAYOUTS[layout]()
    step = make_train_step(structure, tx, loss_fn, layout=layout, accumulate=accumulate)

    def state():
        made = create_state(*jax.tree.map(jnp.copy, (params, stats)), tx)
        return made if layout is None else jax.device_put(made, layout.state(made))

    return step, state


def batch_of(largest=4.0):
    x = np.random.default_rng(0).uniform(-1, 1, (8, 64)).astype(np.float32)
    x[6, 3] = largest  # on the second device, and in the first micro-batch
    return {"x": jnp.asarray(x)}


def histories(state):
    return {name: np.asarray(value) for name, value in state.stats.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_remembers_the_largest_activation_weight_and_gradient_of_all_devices(layout):
    step, begun = begin(layout=layout)
    state, _ = step(begun(), batch_of())
    state, _ = step(state, batch_of(2.0))
    at_hand, newest, before = histories(state)[NAME].T[:3]
    assert (at_hand == 0).all()
    assert (newest[0], before[0]) == (2.0, 4.0)
    assert newest[1] > 0
    assert newest[2] > 0
    expected, _ = begin()[0](begin()[1](), batch_of())
    np.testing.assert_allclose(before, histories(expected)[NAME][:, 1], rtol=0.02)  # bfloat16, and sums in other orders


def test_a_skipped_step_leaves_every_bit_of_the_history():
    step, begun = begin()
    state, _ = step(begun(), batch_of())
    before, weight = histories(state), np.asarray(state.params["layers/0/kernel"])
    state, metrics = step(state, batch_of(np.inf))
    assert not metrics["finite"]
    for name, value in histories(state).items():
        np.testing.assert_array_equal(value, before[name])
    np.testing.assert_array_equal(state.params["layers/0/kernel"], weight)
    assert step._cache_size() == 1


def test_micro_batches_are_one_step_of_the_history_which_has_the_largest_of_them():
    step, begun = begin(accumulate=2)
    state, _ = step(begun(), batch_of())
    history = histories(state)[NAME]
    assert history[0, 1] == 4.0
    assert (history[1:, 1] > 0).all()
    assert (history[:, [0, *range(2, 17)]] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "fsdp"])
@pytest.mark.parametrize("recipe", ["float8", "float8_delayed", "mxfp8"])
def test_two_devices_train_as_one(recipe, layout):
    (one, begun), (two, begun_two) = begin(recipe), begin(recipe, layout)
    state, other = begun(), begun_two()
    for _ in range(3):
        state, metrics = one(state, batch_of())
        other, metrics_two = two(other, batch_of())
    np.testing.assert_allclose(metrics["loss"], metrics_two["loss"], rtol=1e-3)
    begun, one, two = (np.asarray(each.params["layers/0/kernel"]) for each in (begun(), state, other))
    # Sums in another order may round a gradient to the next number of e5m2, a quarter away.
    assert np.linalg.norm(two - one) < 0.02 * np.linalg.norm(one - begun)
