"""One literal step of every rule, decay of kernels only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.config import Optimizer, Precision
from mpjax.errors import UsageError
from mpjax.models import apart, apart_in
from mpjax.precision import HalfMomentsState, LossScaleState, MasterWeightsState, loss_scale_state
from mpjax.training import Kernels, update_rule, with_precision


KERNEL = jnp.array([[1.0, -2.0]])
BIAS = jnp.array([1.0, -2.0])
PARAMS = {"kernel": KERNEL, "bias": BIAS}
GRADS = {"kernel": jnp.array([[0.3, 0.4]]), "bias": jnp.array([0.0, 1.2])}  # norm 1.3


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Optax divides by integer step counts; the train step allows that for its sake, as this does."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def step_of(config, grads=GRADS, steps=1, rate=0.1, params=PARAMS):
    tx = update_rule(config, lambda count: rate)
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
    return {name: np.asarray(value) for name, value in updates.items()}


def test_one_step_of_sgd():
    """-0.1 * (g + 0.01 p) for the kernel, -0.1 * g for the bias; Nesterov's first step is 1.9 times that."""
    plain = step_of(Optimizer(name="sgd", momentum=0.0, nesterov=False, weight_decay=0.01))
    np.testing.assert_allclose(plain["kernel"], [[-0.031, -0.038]], rtol=1e-6)
    np.testing.assert_allclose(plain["bias"], [0, -0.12], rtol=1e-6)
    nesterov = step_of(Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01))
    np.testing.assert_allclose(nesterov["kernel"], [[-0.0589, -0.0722]], rtol=1e-6)


def test_two_steps_of_sgd_with_momentum():
    second = step_of(Optimizer(name="sgd", momentum=0.9, nesterov=False, weight_decay=0.0), steps=2)
    np.testing.assert_allclose(second["bias"], [0, -0.1 * 1.9 * 1.2], rtol=1e-6)


def test_one_step_of_adamw():
    """The first step is the gradient's sign times the rate, besides decay; eps is added to the root."""
    updates = step_of(Optimizer(name="adamw", eps=0.1, weight_decay=0.01))
    np.testing.assert_allclose(updates["kernel"], [[-0.1 * (0.75 + 0.01), -0.1 * (0.8 - 0.02)]], rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], [0, -0.1 * 1.2 / 1.3], rtol=1e-5)


def test_the_second_moment_decays_with_b2_and_the_first_with_b1():
    tx = update_rule(Optimizer(name="adamw", b1=0.8, b2=0.9), lambda count: 0.1)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    adam = state[1][0]
    np.testing.assert_allclose(adam.mu["bias"], [0, 0.2 * 1.2], rtol=1e-5)
    np.testing.assert_allclose(adam.nu["bias"], [0, 0.1 * 1.44], rtol=1e-5)


def test_one_step_of_lamb():
    """LAMB scales Adam's direction to the parameter's norm: all of it moves by 0.1 * |p|."""
    updates = step_of(Optimizer(name="lamb", weight_decay=0.0, eps=1e-8))
    np.testing.assert_allclose(updates["kernel"], -0.1 * 5**0.5 * np.array([[1, 1]]) / 2**0.5, rtol=1e-5)
    np.testing.assert_allclose(updates["bias"], [0, -0.1 * 5**0.5], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_decay_spares_norms_and_biases(name):
    zero = {name: jnp.zeros_like(value) for name, value in PARAMS.items()}
    updates = step_of(Optimizer(name=name, weight_decay=0.5, momentum=0.0, nesterov=False), grads=zero)
    assert updates["bias"].tolist() == [0, 0]
    assert np.all(updates["kernel"] * np.asarray(KERNEL) < 0)


@pytest.mark.parametrize(("clip_norm", "factor"), [(0.13, 0.1), (1.3, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_clipping_is_to_the_global_norm(clip_norm, factor):
    config = Optimizer(name="sgd", momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=clip_norm)
    np.testing.assert_allclose(step_of(config)["bias"], [0, -0.12 * factor], rtol=1e-5)


def test_decay_comes_after_clipping():
    config = Optimizer(name="sgd", momentum=0.0, nesterov=False, weight_decay=0.01, clip_norm=0.13)
    np.testing.assert_allclose(step_of(config)["kernel"], [[-0.1 * (0.03 + 0.01), -0.1 * (0.04 - 0.02)]], rtol=1e-5)


@pytest.mark.parametrize("scale", ["none", "dynamic", 1024.0])
def test_clipping_gives_the_same_update_whatever_the_loss_scale(scale):
    config = Optimizer(name="sgd", momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=0.13)
    tx = with_precision(update_rule(config, lambda count: 0.1), Precision(), loss_scale=scale, weights="none")
    state = tx.init(PARAMS)
    factor = loss_scale_state(state).scale
    assert float(factor) == {"none": 1, "dynamic": 32768}.get(scale, 1024)
    updates, _ = tx.update({name: g * factor for name, g in GRADS.items()}, state, PARAMS)
    np.testing.assert_allclose(updates["bias"], [0, -0.012], rtol=1e-5)


def test_the_settings_of_the_dynamic_scale_arrive():
    config = Precision(initial_scale=64, growth_interval=2, min_scale=32, max_scale=128, hysteresis=2)
    tx = with_precision(update_rule(Optimizer(), lambda count: 0.1), config, loss_scale="dynamic", weights="none")
    bad = {name: g * jnp.inf for name, g in GRADS.items()}
    state, scales = tx.init(PARAMS), []
    for grads in (GRADS,) * 6 + (bad,) * 6:
        _, state = tx.update(grads, state, PARAMS)
        scales.append(float(state.scale))
    # Doubled after two good steps, at most 128; halved from the second overflow in a row on, at least 32.
    assert scales == [64, 128, 128, 128, 128, 128, 128, 64, 32, 32, 32, 32]


def test_masters_are_inside_the_loss_scaling():
    tx = with_precision(
        update_rule(Optimizer(), lambda count: 0.1), Precision(), loss_scale="dynamic", weights="copies"
    )
    state = tx.init({name: value.astype(jnp.float16) for name, value in PARAMS.items()})
    assert isinstance(state, LossScaleState)
    assert isinstance(state.inner_state, MasterWeightsState)
    assert state.inner_state.masters["kernel"].dtype == jnp.float32


def test_a_static_scale_that_is_no_power_of_two_is_refused():
    with pytest.raises(UsageError, match="a power of two"):
        with_precision(update_rule(Optimizer(), lambda count: 0.1), Precision(), loss_scale=3.0, weights="none")


def test_the_tolerance_of_the_dynamic_scale_arrives():
    config = Precision(initial_scale=64, tolerance=0.5)
    tx = with_precision(update_rule(Optimizer(), lambda count: 0.1), config, loss_scale="dynamic", weights="none")
    bad = {name: g * jnp.inf for name, g in GRADS.items()}
    state, scales = tx.init(PARAMS), []
    for grads in (GRADS, GRADS, bad, bad):
        _, state = tx.update(grads, state, PARAMS)
        scales.append(float(state.scale))
    assert scales == [64, 64, 64, 32]


@pytest.mark.parametrize("stochastic", [False, True])
def test_rounding_by_chance_arrives(stochastic):
    config = Precision(stochastic_rounding=stochastic)
    tx = with_precision(update_rule(Optimizer(), lambda count: 0.1), config, loss_scale="none", weights="copies")
    state = tx.init({name: value.astype(jnp.bfloat16) for name, value in PARAMS.items()})
    assert (state.inner_state.roundings is not None) == stochastic


@pytest.mark.parametrize(("name", "moments"), [("sgd", 2), ("adamw", 4), ("lamb", 4)])
def test_bfloat16_moments_are_inside_the_loss_scaling_and_the_masters(name, moments):
    config = Optimizer(name=name, moments="bfloat16", clip_norm=1.0)
    tx = with_precision(update_rule(config, lambda count: 0.1), Precision(), loss_scale="dynamic", weights="copies")
    state = tx.init({name: value.astype(jnp.float16) for name, value in PARAMS.items()})
    assert isinstance(state.inner_state, MasterWeightsState)
    assert isinstance(state.inner_state.inner_state, HalfMomentsState)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.inner_state.inner_state.inner_state)]
    assert dtypes.count(jnp.bfloat16) == moments
    assert state.inner_state.masters["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    "name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw", pytest.param("lamb", marks=pytest.mark.slow)]
)
def test_with_bfloat16_moments_twenty_steps_are_in_the_mean_those_of_float32(name):
    """Of 500 copies of each parameter, which are rounded apart: the mean within 0.3 %, each within 6 %."""
    params, grads = (jax.tree.map(lambda x: jnp.tile(x.ravel(), 500), tree) for tree in (PARAMS, GRADS))
    found = [
        step_of(Optimizer(name=name, moments=moments), grads, steps=20, params=params)
        for moments in ("float32", "bfloat16")
    ]
    for parameter in PARAMS:
        exact, rounded = (each[parameter].reshape(500, -1) for each in found)
        np.testing.assert_allclose(rounded, exact, rtol=0.06)
        np.testing.assert_allclose(rounded.mean(axis=0), exact[0], rtol=0.003)
        assert np.all((rounded.std(axis=0) > 0) == (exact[0] != 0))


def test_by_default_moments_are_float32():
    state = update_rule(Optimizer(name="adamw"), lambda count: 0.1).init(PARAMS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


STACKED = {
    "blocks/all/kernel": jnp.array([[[1.0, -2.0]], [[3.0, 0.5]]]),
    "blocks/all/bias": jnp.array([[0.0, 4.0], [2.0, 1.0]]),
    "head/bias": jnp.array([1.0]),
}
SLOPES = {
    "blocks/all/kernel": jnp.array([[[0.3, 0.4]], [[-0.1, 2.0]]]),
    "blocks/all/bias": jnp.array([[0.5, 1.2], [0.1, -3.0]]),
    "head/bias": jnp.array([0.25]),
}


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw", "lamb"])
def test_an_update_of_a_stack_is_that_of_each_block(name):
    """With decay, which spares biases, also where a stack of them has two axes, and LAMB's ratio for each block."""
    stacks = {"blocks": 2}
    config = Optimizer(name=name, weight_decay=0.3, clip_norm=1.0)
    found = []
    for tx, params, grads in (
        (update_rule(config, lambda count: 0.1), apart(STACKED, stacks), apart(SLOPES, stacks)),
        (update_rule(config, lambda count: 0.1, Kernels(stacks)), STACKED, SLOPES),
    ):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        found.append(updates)
    alone, stacked = found[0], apart(found[1], stacks)
    assert stacked.keys() == alone.keys()
    for path, update in alone.items():
        np.testing.assert_allclose(stacked[path], update, rtol=1e-5, err_msg=path)


def test_the_optimizer_of_stacks_is_that_of_single_blocks_too():
    """A diagnosis looks at the blocks of a stack one by one, with the run's own optimizer."""
    stacks = {"blocks": 2}
    config = Optimizer(name="lamb", weight_decay=0.5)
    tx, usual = update_rule(config, lambda count: 0.1, Kernels(stacks)), update_rule(config, lambda count: 0.1)
    params, grads = apart(STACKED, stacks), apart(SLOPES, stacks)
    for one, other in zip(
        jax.tree.leaves(tx.update(grads, apart_in(tx.init(STACKED), stacks), params)),
        jax.tree.leaves(usual.update(grads, usual.init(params), params)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_lamb_is_optaxs():
    config = Optimizer(name="lamb", weight_decay=0.1)
    mask = {"kernel": True, "bias": False}
    theirs = optax.lamb(0.1, config.b1, config.b2, config.eps, weight_decay=0.1, mask=mask)
    updates, state = theirs.update(GRADS, theirs.init(PARAMS), PARAMS)
    ours, own = (tx := update_rule(config, lambda count: 0.1)).update(GRADS, tx.init(PARAMS), PARAMS)
    assert len(state) == len(own[1])
    for name, update in updates.items():
        np.testing.assert_allclose(ours[name], update, rtol=1e-6)
