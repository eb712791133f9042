"""Master weights: updates too small for half precision add up in float32 copies that the parameters follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.precision import (
    MasterWeightsState,
    apply_policy,
    dynamic_loss_scaling,
    master_weights,
    no_loss_scaling,
    where_finite,
)


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
def test_a_relative_update_of_1e_4_moves_masters_and_stalls_without(half):
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


def test_masters_moments_and_what_the_inner_optimizer_sees_are_float32():
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


def test_on_a_skipped_step_the_masters_keep_every_bit():
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
def test_under_the_bfloat16_preset_an_nnx_model_learns_from_small_updates_with_masters_only(wrap, kernel):
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


# Rounding by chance

STOCHASTIC = {"stochastic_rounding": True}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("half", HALVES)
def test_rounded_by_chance_parameters_equal_their_masters_in_the_mean(half):
    """Twenty updates of a hundredth of a step each: the nearest is one for all, by chance a fifth have moved on."""
    step = float(jnp.finfo(half).eps)
    params, grads = {"w": jnp.ones(20_000, half)}, {"w": jnp.ones(20_000, half)}
    nearest, _ = run(master_weights(optax.sgd(-0.01 * step)), params, grads, 20)
    moved, state = run(master_weights(optax.sgd(-0.01 * step), **STOCHASTIC), params, grads, 20)
    assert set(nearest["w"].tolist()) == {1.0}
    assert set(moved["w"].tolist()) == {1.0, 1.0 + step}
    assert moved["w"].dtype == half
    mean = np.mean(np.asarray(moved["w"], np.float64))
    assert mean - 1.0 == pytest.approx(0.2 * step, abs=5 * 0.4 * step / 20_000**0.5)
    np.testing.assert_allclose(state.masters["w"], 1.0 + 0.2 * step, rtol=1e-6)
    assert state.roundings == 20


def test_masters_take_the_same_path_however_parameters_are_rounded():
    params, grads = {"w": jnp.array([0.1, -3.0], jnp.bfloat16)}, {"w": jnp.array([0.5, -0.25], jnp.bfloat16)}
    _, nearest = run(master_weights(optax.adam(1e-2)), params, grads, 10)
    _, by_chance = run(master_weights(optax.adam(1e-2), **STOCHASTIC), params, grads, 10)
    assert bits((nearest.masters, nearest.inner_state)) == bits((by_chance.masters, by_chance.inner_state))


def test_rounding_repeats_by_seed_and_differs_by_seed_from_update_to_update_and_from_leaf_to_leaf():
    params = {"v": jnp.ones(64, jnp.bfloat16), "w": jnp.ones(64, jnp.bfloat16)}

    def rounded(seed, updates):
        # Every update rounds the same masters, half a step above one.
        tx = master_weights(optax.sgd(1.0), seed=seed, **STOCHASTIC)
        grads = jax.tree.map(lambda p: jnp.full_like(p, -(2.0**-8)), params)
        state, after = tx.init(params), []
        for _ in range(updates):
            state = state._replace(masters=jax.tree.map(lambda p: p.astype(jnp.float32), params))
            updated, state = jax.jit(tx.update)(grads, state, params)
            after.append(jax.tree.map(np.asarray, optax.apply_updates(params, updated)))
        return after

    one, two = rounded(0, 2)
    assert bits(rounded(0, 2)) == bits([one, two])
    assert bits(rounded(1, 1)) != bits([one])
    assert not np.array_equal(one["v"], one["w"])
    assert 10 < np.sum(one["w"] != 1.0) < 54
    assert not np.array_equal(one["w"], two["w"])


def test_a_parameter_whose_copy_did_not_move_keeps_every_bit():
    tx = master_weights(optax.sgd(2.0**-10), **STOCHASTIC)
    params = {"w": jnp.full(200, 1.0, jnp.bfloat16)}
    params, state = run(tx, params, {"w": jnp.full(200, -1.0, jnp.bfloat16)}, 4)
    assert len(set(params["w"].tolist())) == 2
    assert set(state.masters["w"].tolist()) == {1.0 + 2.0**-8}  # half way: a new draw would move about half of them
    half = jnp.where(jnp.arange(200) < 100, 0.0, -1.0).astype(jnp.bfloat16)
    updates, after = tx.update({"w": half}, state, params)
    moved = optax.apply_updates(params, updates)
    assert bits(moved["w"][:100]) == bits(params["w"][:100])
    assert bits(moved["w"][100:]) != bits(params["w"][100:])
    assert after.roundings == 5


def test_on_a_skipped_step_the_count_of_roundings_stays_and_the_next_draws_are_the_same():
    tx = dynamic_loss_scaling(master_weights(optax.adam(0.01), **STOCHASTIC), initial_scale=1.0)
    params = {"w": jnp.ones(50, jnp.bfloat16), "full": jnp.ones(2, jnp.float32)}
    good = {"w": jnp.ones(50, jnp.bfloat16), "full": jnp.ones(2, jnp.float32)}
    bad = {**good, "full": jnp.array([jnp.inf, 1.0], jnp.float32)}
    update, state = jax.jit(tx.update), tx.init(params)
    updates, skipped = update(bad, state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert skipped.inner_state.roundings == 0
    assert bits(update(good, skipped, params)[0]) == bits(update(good, state, params)[0])
    assert update(good, skipped, params)[1].inner_state.roundings == 1


def test_by_default_nothing_is_counted():
    state = master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.float16)})
    assert state._fields == ("masters", "inner_state", "roundings")
    assert state.roundings is None


def test_parameters_that_are_not_half_move_as_without_also_beside_rounded_ones():
    params = {"full": jnp.full(2, 0.1, jnp.float32), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    grads = {"full": jnp.ones(2, jnp.float32), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    moved, _ = run(master_weights(optax.sgd(0.125), **STOCHASTIC), params, grads, 3)
    alone, _ = run(optax.sgd(0.125), {"full": params["full"]}, {"full": grads["full"]}, 3)
    assert bits(moved["full"]) == bits(alone["full"])
    assert moved["half"].tolist() == [0.625] * 2


WINDOWS = {
    "masters inside": lambda inner: optax.MultiSteps(master_weights(inner, **STOCHASTIC), 2),
    "masters around": lambda inner: master_weights(optax.MultiSteps(inner, 2), **STOCHASTIC),
}


@pytest.mark.parametrize("wrap", WINDOWS.values(), ids=WINDOWS)
def test_with_accumulation_parameters_move_between_windows_only_and_a_bad_window_is_lost(wrap):
    tx = dynamic_loss_scaling(wrap(optax.sgd(0.0025)), initial_scale=2.0)
    step, params = jax.jit(tx.update), {"w": jnp.ones(50, jnp.bfloat16)}
    state, seen = tx.init(params), []
    for value in (1.0, 3.0, 1.0, jnp.inf, 1.0, 1.0):
        grads = {"w": (jnp.full(50, value) * state.scale).astype(jnp.bfloat16)}
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(params["w"], np.float32))
    moved = [not np.array_equal(old, new) for old, new in zip([np.ones(50), *seen[:-1]], seen, strict=True)]
    assert moved == [False, True, False, False, False, True]
    masters = [leaf for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MasterWeightsState))
               if isinstance(leaf, MasterWeightsState)]  # fmt: skip
    # The mean of 1 and 3, then of 1 and 1, times 0.0025 each.
    np.testing.assert_allclose(masters[0].masters["w"], 1.0 - 0.005 - 0.0025, rtol=1e-6)
    assert (state.scale, state.skipped) == (1.0, 1)


def test_masters_for_some_labels_only():
    def labels(params):
        return {name: "kept" if name == "w" else "plain" for name in params}

    tx = dynamic_loss_scaling(
        optax.multi_transform({"kept": master_weights(optax.sgd(1e-4), **STOCHASTIC), "plain": optax.sgd(1e-4)}, labels)
    )
    params = {"w": jnp.ones(4, jnp.float16), "v": jnp.ones(4, jnp.float16)}

    def true(state):
        return {name: jnp.full(4, state.scale, jnp.float16) for name in params}

    @jax.jit
    def step(params, state):
        updates, state = tx.update(true(state), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(100):
        params, state = step(params, state)
    (masters,) = [leaf for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MasterWeightsState))
                  if isinstance(leaf, MasterWeightsState)]  # fmt: skip
    np.testing.assert_allclose(masters.masters["w"], 0.99, rtol=1e-5)
    assert isinstance(masters.masters["v"], optax.MaskedNode)
    np.testing.assert_allclose(params["w"].astype(jnp.float32), 0.99, atol=2.0**-11)
    assert params["v"].tolist() == [1.0] * 4


@pytest.mark.parametrize("stochastic", [False, True])
def test_members_of_an_ensemble_keep_masters_of_their_own(stochastic):
    tx = dynamic_loss_scaling(master_weights(optax.sgd(1e-3), stochastic_rounding=stochastic), initial_scale=1.0)
    params = {"w": jnp.ones((3, 4), jnp.bfloat16)}
    state = jax.vmap(tx.init)(params)
    grads = {"w": jnp.array([1.0, jnp.inf, 2.0], jnp.bfloat16)[:, None] * jnp.ones((3, 4), jnp.bfloat16)}
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    np.testing.assert_allclose(state.inner_state.masters["w"][:, 0], [0.999, 1.0, 0.998], rtol=1e-6)
    assert state.finite.tolist() == [True, False, True]
    assert bits(optax.apply_updates(params, updates)["w"][1]) == bits(params["w"][1])


HARD = np.float32(
    [0.0, -0.0, 1e-9, -1e-9, 3e-8, -3e-8, 6e-8, 1e-40, 1 + 2**-8, 1 + 3 * 2**-9, 1 + 2**-11, 1 - 2**-9, 65519]
)


@pytest.mark.parametrize("chance", [False, True])
@pytest.mark.parametrize("half", HALVES)
def test_a_parameter_that_the_user_sets_takes_the_place_of_its_copy_and_no_other(half, chance):
    tx = master_weights(optax.sgd(1.0), stochastic_rounding=chance)
    start = jnp.zeros(len(HARD), half)
    updates, state = jax.jit(tx.update)(-HARD, tx.init(start), start)
    params = optax.apply_updates(start, updates)
    masters = np.asarray(state.masters)
    updates, state = jax.jit(tx.update)(0 * HARD, state, params)  # nothing was set: every copy stays
    np.testing.assert_array_equal(state.masters, masters)
    loaded = params.at[4:].set(3.0)
    updates, state = jax.jit(tx.update)(0 * HARD, state, loaded)
    np.testing.assert_array_equal(state.masters, np.where(np.arange(len(HARD)) < 4, masters, np.float32(3)))
    assert optax.apply_updates(loaded, updates)[4:].tolist() == [3.0] * (len(HARD) - 4)
    updates, state = jax.jit(tx.update)(0 * HARD, state, jnp.full_like(start, jnp.nan))
    assert np.isnan(state.masters).all()
