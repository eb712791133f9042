"""Moments in 8 bits: unbiased, a byte each, never zero under Adam's root, and as good as float32's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import DynamicCodes, LinearCodes, decoded, dynamic_loss_scaling, encoded, int8_moments, table


INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
KINDS = [(INT8, "dynamic"), (INT8, "linear"), (UINT8, "dynamic"), (UINT8, "linear")]


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def numbers(shape=(32, 130)):
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=shape) * np.exp(random.normal(size=shape)), jnp.float32)


def back(x, seed, dtype, quantisation):
    x = jnp.asarray(np.abs(x) if dtype == UINT8 else x)
    return np.asarray(decoded(encoded(x, np.uint32(seed), dtype, quantisation)))


def test_dynamic_tables_have_seven_decades_and_linear_ones_equal_steps():
    """Dettmers et al., 2021: the middles of 2^i parts of each decade, i from 0; the last is 1."""
    np.testing.assert_allclose(table(INT8, "dynamic")[:4], [0, 5.5e-7, 3.25e-6, 7.75e-6], rtol=1e-6)
    np.testing.assert_allclose(table(UINT8, "dynamic")[:4], [0, 3.25e-7, 7.75e-7, 2.125e-6], rtol=1e-6)
    assert [len(table(*kind)) for kind in KINDS] == [128, 128, 255, 255]
    assert [float(table(*kind)[-1]) for kind in KINDS] == [1.0] * 4
    np.testing.assert_allclose(np.diff(table(UINT8, "linear")), 1 / 254, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_number_lies_between_two_values_and_its_mean_is_exact(kind):
    x = np.abs(numbers()) if kind[0] == UINT8 else np.asarray(numbers())
    once = back(x, 0, *kind)
    steps = np.diff(table(*kind)).max()
    groups = [x[:, :128], x[:, 128:]]
    for values, rounded in zip(groups, [once[:, :128], once[:, 128:]], strict=True):
        assert np.all(np.abs(rounded - values) <= 1.001 * steps * np.abs(values).max(axis=1, keepdims=True))
    mean = np.mean([back(x, seed, *kind) for seed in range(100)], axis=0)
    largest = np.concatenate([np.broadcast_to(np.abs(g).max(axis=1, keepdims=True), g.shape) for g in groups], axis=1)
    above = np.abs(x) >= table(*kind)[1] * largest  # below, second moments are rounded up
    # A hundred roundings leave a tenth of the error of one.
    assert np.linalg.norm((mean - x)[above]) < 0.15 * np.linalg.norm((once - x)[above])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_of_the_table_keep_every_bit(kind):
    values = table(*kind)
    x = jnp.asarray(np.resize(values, (2, 128)) * 4).at[:, 0].set(4.0)
    np.testing.assert_array_equal(back(x, 3, *kind), x)


@pytest.mark.parametrize("quantisation", ["dynamic", "linear"])
def test_a_second_moment_above_zero_stays_above_zero_and_zero_is_zero(quantisation):
    x = np.array([[1.0, 1e-12, 1e-30, 0.0] * 32] * 2, np.float32)
    for seed in range(5):
        rounded = back(x, seed, UINT8, quantisation)
        assert np.all((rounded > 0) == (x > 0))
    smallest = {"dynamic": 3.25e-7, "linear": 1 / 254}[quantisation]
    np.testing.assert_allclose(rounded[0, 1:3], smallest, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("places", [(3,), tuple(range(16))], ids=["one", "sixteen"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_becomes_nan_and_changes_no_neighbour(kind, places, value):
    x, zeros = np.array([numbers((2, 40))] * 2)
    x[0, places], zeros[0, places] = value, 0.0
    changed, wanted = back(x, 0, *kind), back(zeros, 0, *kind)
    assert np.isnan(changed[0, list(places)]).all()
    np.testing.assert_array_equal(np.delete(changed, places, 1), np.delete(wanted, places, 1))


@pytest.mark.parametrize("largest", [2.0**-126, 1.0, 2.0**127, 3.4028235e38])
def test_a_group_of_any_size_keeps_its_largest_number(largest):
    rounded = back(jnp.zeros((1, 128)).at[0, :2].set(jnp.array([largest, -largest])), 0, INT8, "dynamic")
    np.testing.assert_allclose(rounded[0, :3], [largest, -largest, 0], rtol=1e-6)


@pytest.mark.parametrize(("quantisation", "kind"), [("dynamic", DynamicCodes), ("linear", LinearCodes)])
def test_moments_take_a_byte_each_and_small_ones_four(quantisation, kind):
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128), "thin": jnp.ones((512, 8))}
    state = jax.eval_shape(int8_moments(optax.adamw(1e-3), quantisation=quantisation).init, params).inner_state[0]
    for moments, dtype in ((state.mu, "int8"), (state.nu, "uint8")):
        assert isinstance(moments["w"], kind)
        assert [(leaf.shape, str(leaf.dtype)) for leaf in moments["w"]] == [((64, 128), dtype), ((64, 1), "float32")]
        assert (str(moments["b"].dtype), str(moments["thin"].dtype)) == ("float32", "float32")


def test_moments_in_another_dtype_stay_in_it():
    tx = int8_moments(optax.adamw(1e-3, mu_dtype=jnp.bfloat16))
    params = {"w": jnp.ones((64, 128))}

    def after(params):
        return tx.update(params, tx.init(params), params)[1]

    mu = jax.eval_shape(after, params).inner_state[0].mu["w"]
    assert (mu.shape, str(mu.dtype)) == ((64, 128), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("rule", [optax.adamw(1e-2), optax.sgd(1e-3, momentum=0.9)], ids=["adamw", "momentum"])
def test_a_run_ends_where_float32_does(rule):
    wanted = numbers((64, 100))

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

    assert run(int8_moments(rule)) == pytest.approx(run(rule), rel=0.02)


def test_a_skipped_step_keeps_every_bit():
    tx = dynamic_loss_scaling(int8_moments(optax.adamw(1e-2)), initial_scale=8.0)
    params = {"w": numbers((64, 100))}
    update = jax.jit(tx.update)
    _, state = update(params, jax.jit(tx.init)(params), params)
    _, after = update({"w": jnp.full_like(params["w"], jnp.inf)}, state, params)
    for one, other in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(after.inner_state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_optimizer_without_moments_is_an_error():
    with pytest.raises(UsageError, match="int8_moments: no moments"):
        int8_moments(optax.sgd(0.1)).init({"w": jnp.ones(3)})
