"""First moments in float8: unbiased, a byte each, and as good as float32's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import dynamic_loss_scaling
from mpjax.precision.float8 import Grouped, float8_moments, grouped, ungrouped


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def numbers(spread=1.0, shape=(64, 100)):
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=shape) * np.exp(spread * random.normal(size=shape)), jnp.float32)


there_and_back = jax.jit(lambda x, seed: ungrouped(grouped(x, seed)))


def back(x, seed):
    return np.asarray(there_and_back(x, np.uint32(seed)))


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
def test_groups_of_zeros_stay_what_they_are():
    np.testing.assert_array_equal(back(jnp.zeros((2, 128)), 0), 0)


@pytest.mark.parametrize("columns", [16, 100, 128, 200])
@pytest.mark.parametrize("places", [(3,), (0, 1, 15), tuple(range(16))], ids=["one", "three", "sixteen"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_changes_no_neighbour_and_does_not_become_finite(value, places, columns):
    x, zeros = np.array([numbers(shape=(2, columns))] * 2)
    x[0, places], zeros[0, places] = value, 0.0
    found, wanted = back(x, 0), back(zeros, 0)
    assert np.isnan(found[0, list(places)]).all()
    np.testing.assert_array_equal(np.delete(found, places, 1), np.delete(wanted, places, 1))


def test_no_second_moment_changes_its_neighbours_and_inf_stays_inf():
    gradient = numbers(shape=(32, 128))
    tx = float8_moments(optax.scale_by_adam())
    params = {"w": gradient}
    update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
    _, wanted = update({"w": gradient.at[0, :2].set(0.0)}, state, params)
    _, found = update({"w": gradient.at[0, :2].set(jnp.array([jnp.inf, jnp.nan]))}, state, params)
    nu, wanted_nu = (np.asarray(state.inner_state.nu["w"], np.float32).reshape(-1) for state in (found, wanted))
    assert np.isposinf(nu[0])
    assert np.isnan(nu[1])
    np.testing.assert_array_equal(nu[2:], wanted_nu[2:])


@pytest.mark.parametrize("largest", [2.0**-126, 2.0**-100, 1.0, 2.0**100, 2.0**127, 3.4028235e38])
def test_a_group_of_any_size_keeps_its_largest_number_and_a_half_of_it(largest):
    """A CPU flushes subnormal numbers to zero, and so would be 1 / 2^127."""
    found = back(jnp.zeros((1, 128)).at[0, :3].set(jnp.array([largest, -largest, largest / 2])), 0)
    np.testing.assert_allclose(found[0, :2], [largest, -largest], rtol=1e-6)
    if largest > 2.0**-126:
        np.testing.assert_allclose(found[0, 2], largest / 2, rtol=0.05)
    np.testing.assert_array_equal(found[0, 3:], 0)


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
    update = jax.jit(tx.update)
    _, state = update(params, jax.jit(tx.init)(params), params)
    _, after = update({"w": jnp.full_like(params["w"], jnp.inf)}, state, params)
    for one, other in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(after.inner_state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_optimizer_without_moments_is_an_error():
    with pytest.raises(UsageError, match="float8_moments: no moments"):
        float8_moments(optax.sgd(0.1)).init({"w": jnp.ones(3)})
