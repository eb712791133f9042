"""Master weights: updates too small for half precision add up in float32 copies that the parameters follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.precision import apply_policy, dynamic_loss_scaling, master_weights, no_loss_scaling, where_finite
from mpjax.precision.master import MasterWeightsState


HALVES = [jnp.float16, jnp.bfloat16]


@pytest.fixture(autouse=True)
def _promotion():
    """Half-precision parameters plus float32 updates, which is what `optax.apply_updates` adds."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(tx, params, grads, steps):
    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@pytest.mark.parametrize("half", HALVES)
def test_a24_a_relative_update_of_1e_4_moves_masters_and_stalls_without(half):
    params, grads = {"w": jnp.ones(4, half)}, {"w": jnp.ones(4, half)}
    stalled, _ = run(optax.sgd(1e-4), params, grads, 100)
    moved, state = run(master_weights(optax.sgd(1e-4)), params, grads, 100)
    assert stalled["w"].tolist() == [1.0] * 4
    assert moved["w"].dtype == half
    np.testing.assert_allclose(state.masters["w"], 0.99, rtol=1e-5)
    np.testing.assert_array_equal(moved["w"], state.masters["w"].astype(half))
    assert np.all(moved["w"] < 1.0)


@pytest.mark.parametrize("half", HALVES)
def test_masters_take_the_path_of_float32_training(half):
    start = jnp.array([0.1, -3.0, 700.0], jnp.float32).astype(half)
    grads = jnp.array([0.5, -0.25, 2.0], half)
    params, state = run(master_weights(optax.adam(1e-2)), {"w": start}, {"w": grads}, 20)
    full, _ = run(optax.adam(1e-2), {"w": start.astype(jnp.float32)}, {"w": grads.astype(jnp.float32)}, 20)
    np.testing.assert_allclose(state.masters["w"], full["w"], rtol=1e-6)
    np.testing.assert_array_equal(params["w"], state.masters["w"].astype(half))


def test_a16_masters_moments_and_what_the_inner_optimizer_sees_are_float32():
    seen = []

    def record(updates, state, params=None):
        seen.append((updates["w"].dtype, params["w"].dtype))
        return updates, state

    inner = optax.chain(
        optax.GradientTransformation(lambda params: optax.EmptyState(), record), optax.adamw(0.1, weight_decay=0.1)
    )
    tx, params = master_weights(inner), {"w": jnp.ones(2, jnp.float16)}
    state = tx.init(params)
    assert state.inner_state[1][0].mu["w"].dtype == jnp.float32
    _, after = tx.update({"w": jnp.ones(2, jnp.float16)}, state, params)
    assert seen == [(jnp.float32, jnp.float32)]
    assert after.inner_state[1][0].nu["w"].dtype == after.masters["w"].dtype == jnp.float32


def test_parameters_that_are_not_half_have_no_copy_and_move_as_without():
    params = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2, jnp.float32)}
    grads = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2, jnp.float32)}
    moved, state = run(master_weights(optax.sgd(0.125)), params, grads, 3)
    alone, _ = run(optax.sgd(0.125), {"full": params["full"]}, {"full": grads["full"]}, 3)
    assert state.masters["full"] is None
    np.testing.assert_array_equal(moved["full"], alone["full"])


def test_a1_on_a_skipped_step_the_masters_keep_every_bit():
    tx = dynamic_loss_scaling(master_weights(optax.adamw(0.1)))
    params = {"w": jnp.array([1.0, -0.0], jnp.float16)}
    state = tx.init(params)
    updates, after = jax.jit(tx.update)({"w": jnp.array([jnp.inf, 1.0], jnp.float16)}, state, params)
    new = optax.apply_updates(params, updates)
    assert np.asarray(new["w"]).tobytes() == np.asarray(params["w"]).tobytes()
    assert after.scale == 2.0**14
    for a, b in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert isinstance(where_finite(after, after.inner_state, state.inner_state), MasterWeightsState)


def test_the_parameters_are_required():
    tx = master_weights(optax.sgd(0.1))
    params = {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match=r"needs the parameters: tx.update\(grads, opt_state, params\)"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize(("wrap", "kernel"), [(master_weights, 0.98828125), (lambda inner: inner, 1.0)])
def test_a24_under_the_bfloat16_preset_an_nnx_model_learns_from_small_updates_with_masters_only(wrap, kernel):
    model = nnx.Linear(2, 2, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    apply_policy(model, "bfloat16")
    graph, params = nnx.split(model)

    def loss(params, x):
        return jnp.mean(nnx.merge(graph, params)(x))

    tx = no_loss_scaling(wrap(optax.sgd(1e-4)))

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss)(params, jnp.full((1, 2), 2.0, jnp.float32))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(100):
        params, state = step(params, state)
    assert params["kernel"].get_value().dtype == jnp.bfloat16
    assert params["kernel"].get_value().astype(jnp.float32).tolist() == [[kernel] * 2] * 2
