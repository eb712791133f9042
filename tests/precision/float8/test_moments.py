"""First moments in float8: unbiased, a byte each, and as good as float32's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import dynamic_loss_scaling, float8_moments
from mpjax.precision.float8.moments import Grouped, grouped, ungrouped


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def numbers(spread=1.0, shape=(64, 100)):
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=shape) * np.exp(spread * random.normal(size=shape)), jnp.float32)


def back(x, seed):
    return np.asarray(ungrouped(grouped(x, jnp.uint32(seed))))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_a_number_is_within_an_eighth_and_its_mean_is_exact(spread):
    x = numbers(spread)
    once = back(x, 0)
    largest = np.abs(x).max(axis=1, keepdims=True)
    normal = np.abs(x) > 0.02 * largest  # below, e4m3 has fewer bits
    assert np.all(np.abs(once - x)[normal] <= 0.126 * np.abs(x)[normal])
    mean = np.mean([back(x, seed) for seed in range(100)], axis=0)
    # A hundred roundings leave a tenth of the error of one.
    assert np.linalg.norm(mean - x) < 0.15 * np.linalg.norm(once - x)


@pytest.mark.slow
def test_groups_of_zeros_and_numbers_that_are_not_finite_stay_what_they_are():
    x = jnp.zeros((2, 128)).at[1, 3].set(jnp.inf).at[1, 4].set(jnp.nan)
    found = back(x, 0)
    np.testing.assert_array_equal(found[0], 0)
    assert not np.isfinite(found[1, 3:5]).any()


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "groups"), [(37, 1), (128, 1), (300, 3)])
def test_groups_are_along_the_last_axis_and_the_last_may_be_short(columns, groups):
    x = numbers(shape=(2, 5, columns)).at[0, 0, -1].set(1e6)
    stored = grouped(x, jnp.uint32(0))
    assert (stored.values.shape, str(stored.values.dtype)) == ((2, 5, columns), "float8_e4m3fn")
    assert stored.scale.shape == stored.power.shape == (2, 5, groups)
    assert float(stored.scale[0, 0, -1]) == 1e6
    found = back(x, 0)
    np.testing.assert_allclose(found[1], x[1], rtol=0.2, atol=0.02)
    np.testing.assert_allclose(found[0, 0, -1], 1e6, rtol=1e-6)


@pytest.mark.slow
def test_first_moments_take_a_byte_second_ones_two_and_small_ones_four():
    tx = float8_moments(optax.adamw(1e-3))
    state = tx.init({"w": jnp.ones((64, 128)), "b": jnp.ones(128), "thin": jnp.ones((512, 8))}).inner_state[0]
    assert isinstance(state.mu["w"], Grouped)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state.mu["w"])) == 8192 + 64 * 8
    assert (str(state.nu["w"].dtype), str(state.mu["b"].dtype)) == ("bfloat16", "float32")
    assert str(state.mu["thin"].dtype) == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [optax.adamw(1e-2), optax.sgd(1e-3, momentum=0.9)], ids=["adamw", "momentum"])
def test_a_run_ends_where_float32_does(rule):
    wanted = numbers()

    def loss(params):
        return jnp.sum((params["w"] - wanted) ** 2)

    def run(tx):
        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        params = {"w": jnp.ones_like(wanted)}
        state = tx.init(params)
        for _ in range(100):
            params, state = step(params, state)
        assert step._cache_size() == 1
        return float(loss(params))

    assert run(float8_moments(rule)) == pytest.approx(run(rule), rel=0.01)


def test_a_skipped_step_keeps_every_bit():
    tx = dynamic_loss_scaling(float8_moments(optax.adamw(1e-2)), initial_scale=8.0)
    params = {"w": numbers()}
    _, state = tx.update(params, tx.init(params), params)
    _, after = tx.update({"w": jnp.full_like(params["w"], jnp.inf)}, state, params)
    for one, other in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(after.inner_state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_optimizer_without_moments_is_an_error():
    with pytest.raises(UsageError, match="float8_moments: no moments"):
        float8_moments(optax.sgd(0.1)).init({"w": jnp.ones(3)})
