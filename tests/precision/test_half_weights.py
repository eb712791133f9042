"""Half-precision parameters without float32 copies keep updates that are smaller than their rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import compensated_weights, dynamic_loss_scaling, no_loss_scaling, stochastic_weights


HALVES = [jnp.float16, jnp.bfloat16]
BOTH = pytest.mark.parametrize("wrap", [stochastic_weights, compensated_weights])


@pytest.fixture(autouse=True)
def _promotion():
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


@BOTH
@pytest.mark.parametrize("half", HALVES)
def test_a_hundred_updates_of_1e_4_add_up_to_a_hundredth(wrap, half):
    params = {"w": jnp.ones(20_000, half), "wide": jnp.ones(3)}
    grads = jax.tree.map(jnp.ones_like, params)
    moved, _ = run(wrap(optax.sgd(1e-4)), params, grads, 100)
    assert moved["w"].dtype == half
    # Of bfloat16, the mean of 20,000 numbers a 256th apart: a standard error of 3e-5.
    assert abs(float(jnp.mean(moved["w"].astype(jnp.float32))) - 0.99) < (2e-4 if wrap is stochastic_weights else 4e-3)
    np.testing.assert_allclose(moved["wide"], 0.99, rtol=1e-5)


def test_a_compensation_carries_what_rounding_leaves_over_exactly():
    params = {"w": jnp.bfloat16(1)}
    tx = compensated_weights(optax.sgd(2.0**-10))
    state = tx.init(params)
    for step in range(1, 9):
        updates, state = tx.update({"w": jnp.bfloat16(1)}, state, params)
        params = optax.apply_updates(params, updates)
        assert float(params["w"]) + float(state.compensation["w"]) == 1 - step * 2.0**-10
    assert float(params["w"]) == 1 - 2.0**-7


@pytest.mark.parametrize("half", HALVES)
def test_a_compensated_run_is_that_of_float32_to_sixteen_bits(half):
    start = jnp.array([0.1, -3.0, 700.0], half)
    grads = jnp.array([0.5, -0.25, 2.0], half)
    found, state = run(compensated_weights(optax.adam(1e-2)), {"w": start}, {"w": grads}, 20)
    full, _ = run(optax.adam(1e-2), {"w": start.astype(jnp.float32)}, {"w": grads.astype(jnp.float32)}, 20)
    whole = found["w"].astype(jnp.float32) + state.compensation["w"].astype(jnp.float32)
    np.testing.assert_allclose(whole, full["w"], rtol=2.0**-14)


@BOTH
def test_a_skipped_step_keeps_every_bit_of_parameters_and_state(wrap):
    tx = dynamic_loss_scaling(wrap(optax.adamw(1e-2)), initial_scale=8.0)
    params, state = run(tx, {"w": jnp.linspace(0.1, 3, 40).astype(jnp.bfloat16)}, {"w": jnp.ones(40, jnp.bfloat16)}, 3)
    updates, after = jax.jit(tx.update)({"w": jnp.full(40, jnp.inf, jnp.bfloat16)}, state, params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["w"], params["w"])
    for one, other in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(after.inner_state), strict=True):
        np.testing.assert_array_equal(one, other)


@BOTH
def test_moments_are_float32_and_no_float32_copy_is_kept(wrap):
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    state = no_loss_scaling(wrap(optax.adam(1e-3))).init(params)
    sizes = {}
    for leaf in jax.tree.leaves(state.inner_state):
        if leaf.shape == (8, 8):
            sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + 1
    assert sizes == {"float32": 2, **({"bfloat16": 1} if wrap is compensated_weights else {})}


def test_a_parameter_without_an_update_keeps_every_bit():
    params = {"w": jnp.linspace(-3, 3, 1000).astype(jnp.bfloat16)}
    found, state = run(stochastic_weights(optax.sgd(0.0)), params, {"w": jnp.ones(1000, jnp.bfloat16)}, 2)
    np.testing.assert_array_equal(found["w"], params["w"])
    assert int(state.roundings) == 2


@BOTH
def test_parameters_are_needed(wrap):
    tx = wrap(optax.sgd(1.0))
    state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(UsageError, match="need the parameters"):
        tx.update({"w": jnp.ones(2)}, state)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_left_over_belongs_to_the_parameter_that_left_it(half):
    tx = compensated_weights(optax.sgd(1.0))
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-9, 1 + 2**-11, 1 - 2**-12, 3])
    start = jnp.zeros(len(values), half)
    updates, state = jax.jit(tx.update)(-values, tx.init(start), start)
    params = optax.apply_updates(start, updates)
    kept = np.asarray(state.compensation)
    assert np.count_nonzero(kept) >= 2
    _, again = jax.jit(tx.update)(0 * values, state, params)
    np.testing.assert_array_equal(again.compensation, kept)
    loaded = jnp.full_like(params, 2.0**-14)
    updates, state = jax.jit(tx.update)(0 * values, state, loaded)
    assert optax.apply_updates(loaded, updates).tolist() == [2.0**-14] * len(values)
    assert not np.asarray(state.compensation).any()
