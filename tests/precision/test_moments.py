"""Moments in bfloat16: half the memory, right in the mean, and nothing else of the optimizer's state changed."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision import (
    MOMENTS,
    HalfMomentsState,
    dynamic_loss_scaling,
    half_moments,
    int8_moments,
    master_weights,
    no_loss_scaling,
)
from mpjax.precision.float8 import float8_moments


@pytest.fixture(autouse=True)
def _promotion():
    """Optax divides by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.zeros(3)}
GRADS = {"w": jnp.linspace(0.1, 0.6, 6).reshape(2, 3), "b": jnp.full(3, 0.3)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def after(tx, steps, params=PARAMS, grads=GRADS):
    """Parameters and state after so many steps."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


OPTIMIZERS = {
    "sgd": (optax.sgd(0.1, momentum=0.9), 2),
    "adamw": (optax.adamw(1e-3), 4),
    "lamb": (optax.lamb(1e-3), 4),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), 4),
    "lion": (optax.lion(1e-3), 2),
}


@pytest.mark.parametrize(
    "name", ["sgd", "adamw", "lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rmsprop", "lion"))]
)
def test_moments_are_bfloat16_before_and_after_every_step_and_all_else_is_as_it_was(name):
    inner, count = OPTIMIZERS[name]
    for steps in (0, 2):
        _, state = after(half_moments(inner), steps)
        _, plain = after(inner, steps)
        assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain)
        pairs = list(zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(plain), strict=True))
        assert sum(leaf.dtype == jnp.bfloat16 for leaf, _ in pairs) == count
        for leaf, other in pairs:
            assert leaf.shape == other.shape
            assert leaf.dtype == other.dtype or (leaf.dtype, leaf.shape[-1]) == (jnp.bfloat16, 3)
        assert state.draws == steps


def test_the_first_step_is_that_of_float32_moments_bit_for_bit():
    """Rounded is what is kept, not what the step at hand uses."""
    ours, _ = after(half_moments(optax.adamw(1e-3)), 1)
    plain, _ = after(optax.adamw(1e-3), 1)
    assert bits(ours) == bits(plain)


def test_half_of_the_memory_of_adams_moments():
    params = {"w": jnp.zeros(1000)}

    def size(tx):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params)))

    assert size(optax.adam(1e-3)) == 8004
    assert size(half_moments(optax.adam(1e-3))) == 4008


def second_moment(tx, steps, values=4000):
    """Of gradients that were one and are then a tenth."""
    params = {"w": jnp.zeros(values)}
    state = tx.init(params)._replace()
    state = jax.tree.map(lambda leaf: jnp.ones_like(leaf) if leaf.shape else leaf, state)
    update = jax.jit(tx.update)
    grads = {"w": jnp.full(values, 0.1)}
    for _ in range(steps):
        _, state = update(grads, state, params)
    return np.asarray(optax.tree.get(state, "nu")["w"], np.float64)


def test_a_second_moment_of_b2_0_999_follows_in_the_mean_where_rounding_to_the_nearest_would_stall():
    """From 1, with squares of 0.01, 0.01 + 0.99 * 0.999^500 = 0.610 is right; a step is a quarter of bfloat16's."""
    found = second_moment(half_moments(optax.adam(1e-3)), 500)
    right = 0.01 + 0.99 * 0.999**500
    assert right == pytest.approx(0.610, abs=1e-3)
    assert np.mean(found) == pytest.approx(right, rel=2e-3)
    assert np.std(found) / right < 0.06
    stalled = jnp.bfloat16(1.0)
    for _ in range(500):
        stalled = (stalled.astype(jnp.float32) * 0.999 + 0.001 * 0.01).astype(jnp.bfloat16)
    assert stalled == 1.0


def test_adams_steps_are_those_of_float32_moments_within_some_percent():
    """Along random gradients of different sizes: the sum of 300 steps is off by less than 2 % of its norm."""
    params = {"w": jnp.zeros(2000)}
    size = 10.0 ** np.random.default_rng(1).uniform(-6, 0, 2000)

    def path(tx):
        rng, state, at = np.random.default_rng(0), tx.init(params), params
        update = jax.jit(tx.update)
        for _ in range(300):
            grads = {"w": jnp.asarray(size * (rng.normal(size=2000) + 0.2), jnp.float32)}
            updates, state = update(grads, state, at)
            at = optax.apply_updates(at, updates)
        return np.asarray(at["w"], np.float64)

    ours, plain = path(half_moments(optax.adam(1e-3))), path(optax.adam(1e-3))
    assert np.linalg.norm(ours - plain) / np.linalg.norm(plain) < 0.02
    assert np.mean(ours) == pytest.approx(np.mean(plain), rel=2e-3)


def test_gradients_of_1e_6_have_second_moments_that_float16_would_not_hold():
    grads = {"w": jnp.full((2, 3), 1e-6), "b": jnp.full(3, 1e-6)}
    _, state = after(half_moments(optax.adam(1e-3)), 3, grads=grads)
    nu = np.asarray(state.inner_state[0].nu["w"], np.float64)
    np.testing.assert_allclose(nu, 3e-15, rtol=0.02)
    assert not np.float16(nu).any()


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_a_skipped_step_leaves_every_bit_and_the_next_draws_are_the_same(name):
    tx = dynamic_loss_scaling(half_moments(OPTIMIZERS[name][0]), initial_scale=1.0)
    update = jax.jit(tx.update)
    _, state = update(GRADS, tx.init(PARAMS), PARAMS)
    updates, skipped = update({**GRADS, "b": jnp.array([1.0, jnp.inf, 0.0])}, state, PARAMS)
    assert bits(skipped.inner_state) == bits(state.inner_state)
    assert (int(skipped.inner_state.draws), int(skipped.skipped)) == (1, 1)
    assert bits(optax.apply_updates(PARAMS, updates)) == bits(PARAMS)
    assert bits(update(GRADS, skipped, PARAMS)[0]) == bits(update(GRADS, state, PARAMS)[0])


@pytest.mark.parametrize("scale", [pytest.param(2.0, marks=pytest.mark.slow), 2.0**15])
def test_the_loss_scale_makes_no_difference(scale):
    def run(tx, factor):
        state, params = tx.init(PARAMS), PARAMS
        for _ in range(10):
            grads = jax.tree.map(lambda g: g * factor, GRADS)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    inner = half_moments(optax.adamw(1e-3))
    assert bits(run(dynamic_loss_scaling(inner, initial_scale=scale), scale)) == bits(run(no_loss_scaling(inner), 1.0))


@pytest.mark.parametrize(
    "wrap", [lambda tx: master_weights(half_moments(tx)), lambda tx: half_moments(master_weights(tx))]
)
def test_master_weights_stay_float32_on_either_side(wrap):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = dynamic_loss_scaling(wrap(optax.adam(1e-3)))
    state = tx.init(params)
    _, state = tx.update(jax.tree.map(lambda g: (g * state.scale).astype(jnp.bfloat16), GRADS), state, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(optax.tree.get(state, "masters"))} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(optax.tree.get(state, "nu"))} == {"bfloat16"}


def test_sums_of_micro_batches_stay_float32():
    tx = half_moments(optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation())
    _, state = after(tx, 3)
    multi = state.inner_state
    assert {leaf.dtype.name for leaf in jax.tree.leaves(multi.acc_grads)} == {"float32"}
    assert multi.inner_opt_state[0].nu["w"].dtype == jnp.bfloat16
    assert int(multi.gradient_step) == 1


def test_draws_repeat_by_seed_and_differ_from_moment_to_moment_and_from_update_to_update():
    params, grads = {"v": jnp.zeros(64), "w": jnp.zeros(64)}, {"v": jnp.full(64, 0.3), "w": jnp.full(64, 0.3)}

    def moments(seed, steps):
        _, state = after(half_moments(optax.sgd(0.0, momentum=0.9), seed=seed), steps, params, grads)
        return jax.tree.map(np.asarray, state.inner_state[0].trace)

    assert bits(moments(0, 1)) == bits(moments(0, 1))
    assert bits(moments(0, 1)) != bits(moments(1, 1))
    one = moments(0, 1)
    assert not np.array_equal(one["v"], one["w"])
    up = [np.asarray(moments(0, steps)["w"], np.float64) for steps in (1, 2)]
    assert not np.array_equal(up[0] > np.mean(up[0]), up[1] > np.mean(up[1]))


def test_float64_moments_stay():
    with jax.enable_x64(True):
        params = {"w": jnp.zeros(2, jnp.float64), "v": jnp.zeros(2, jnp.float32)}
        nu = half_moments(optax.adam(1e-3)).init(params).inner_state[0].nu
    assert (nu["w"].dtype, nu["v"].dtype) == (jnp.float64, jnp.bfloat16)


# Made before any test runs: JAX keeps programs by the address of a class, which a later class may take over.
NAMED_TUPLES = {name: collections.namedtuple("Parameters", [name, "w", "v"]) for name in (*MOMENTS, "a")}
DATACLASSES = {
    name: jax.tree_util.register_dataclass(dataclasses.make_dataclass("Parameters", [name, "w", "v"]))
    for name in (*MOMENTS, "a")
}


def named_tuple(name):
    return NAMED_TUPLES[name]


def dataclass_of(name):
    return DATACLASSES[name]


def module_of(name):
    def make(*arrays):
        names = (name, "w", "v")
        return nnx.State({key: nnx.Param(x) for key, x in zip(names, arrays, strict=True)})

    return make


INNER = {
    "masters": lambda: master_weights(optax.adam(1e-3)),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "sums": lambda: optax.MultiSteps(optax.amsgrad(1e-3), 2).gradient_transformation(),
    "masked": lambda: optax.masked(master_weights(optax.adam(1e-3)), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}


@functools.cache
def stored(wrap, inner, kind, name):
    """The shapes and dtypes of the state before and after an update."""
    params = kind(name)(*(jnp.zeros(shape, jnp.bfloat16) for shape in ((64, 128), (64, 128), (3,))))
    tx = wrap(INNER[inner]())
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, state, params)
    return [[(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)] for tree in (state, after)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    "kind", [dataclass_of, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (named_tuple, module_of))]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mu" else pytest.mark.slow) for name in MOMENTS]
)
@pytest.mark.parametrize("wrap", [half_moments, float8_moments])
def test_names_of_parameters_make_no_difference(wrap, name, kind, inner):
    # As all of `MOMENTS`, "a" comes before "v" and "w" in a dict.
    assert stored(wrap, inner, kind, name) == stored(wrap, inner, kind, "a")


def test_an_optimizer_without_moments_is_refused():
    refusal = r"no moments \(mu, nu, nu_max, trace\) in this optimizer's state; leave half"
    with pytest.raises(UsageError, match=refusal):
        half_moments(optax.sgd(0.1)).init(PARAMS)
    for kind in (named_tuple, dataclass_of):
        with pytest.raises(UsageError, match=refusal):
            half_moments(master_weights(optax.sgd(0.1))).init(kind("mu")(*[jnp.ones(2, jnp.bfloat16)] * 3))


@pytest.mark.parametrize("wrap", [half_moments, float8_moments, int8_moments])
def test_a_root_of_a_difference_of_moments_is_refused(wrap):
    """In bfloat16, it is of a negative number after 35 equal gradients, and every number after it is NaN."""
    with pytest.raises(UsageError, match="moments: the centered RMSProp divides by the root of nu - mu\\^2"):
        wrap(optax.masked(optax.rmsprop(0.1, centered=True), True)).init(PARAMS)
    wrap(optax.rmsprop(0.1)).init(PARAMS)


def test_members_of_an_ensemble_draw_alike_and_keep_moments_of_their_own():
    tx = half_moments(optax.adam(1e-3))
    params = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    state = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), GRADS)
    _, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    assert isinstance(state, HalfMomentsState)
    nu = np.asarray(state.inner_state[0].nu["w"], np.float64)
    np.testing.assert_allclose(nu[1] / nu[0], 4.0, rtol=0.02)
