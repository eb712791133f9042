"""Loss scaling: exact growth and backoff, a skipped step that changes nothing else, one trace, no host sync."""

import functools
from fractions import Fraction

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.precision import (
    LossScaleState,
    check_dtypes,
    dynamic_loss_scaling,
    loss_scale_state,
    master_weights,
    no_loss_scaling,
    scale_loss,
    scaled_value_and_grad,
    static_loss_scaling,
    where_finite,
)


INF = float("inf")
NAN = float("nan")
GOOD, BAD = {"w": jnp.array([1.0, -2.0], jnp.float32)}, {"w": jnp.array([INF, 1.0], jnp.float32)}


def start():
    """Parameters with both zeros, because p + 0.0 is not p where p is -0.0."""
    return {"w": jnp.array([0.5, -0.25], jnp.float32), "b": jnp.array([-0.0, 0.0], jnp.float32)}


def gradient(value, params):
    return jax.tree.map(lambda p: jnp.full(p.shape, value, p.dtype), params)


def feeder(tx):
    """A jitted step that hands `tx` a scaled gradient, bad or good."""

    @jax.jit
    def step(params, state, grads):
        scaled = jax.tree.map(lambda g: g * state.scale.astype(g.dtype), grads)
        updates, state = tx.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    return step


def bits(tree):
    return [(np.asarray(leaf).tobytes(), leaf.dtype) for leaf in jax.tree.leaves(tree)]


def scales(tx, sequence):
    """The scale after each step of a sequence of good (True) and bad (False) gradients."""
    update = jax.jit(lambda g, s: tx.update(g, s)[1])
    state, seen = tx.init(GOOD), []
    for good in sequence:
        state = update(GOOD if good else BAD, state)
        seen.append(float(state.scale))
    return seen


# A skipped step


@pytest.mark.parametrize(("bad", "leaf"), [(INF, "w"), (-INF, "b"), (NAN, "b")])
def test_an_overflow_at_step_3_leaves_params_moments_and_schedule_bit_identical(bad, leaf):
    schedule = optax.linear_schedule(0.5, 0.0, 10)
    tx = dynamic_loss_scaling(optax.adamw(schedule, weight_decay=0.1), initial_scale=1024.0)
    step, params = feeder(tx), start()
    state = tx.init(params)
    for _ in range(2):
        params, state = step(params, state, gradient(0.125, params))
    assert (state.scale, state.good_steps) == (1024.0, 2)

    grads = gradient(0.125, params)
    grads[leaf] = grads[leaf].at[1].set(bad)
    new_params, new_state = step(params, state, grads)
    assert bits(new_params) == bits(params)
    assert bits(new_state.inner_state) == bits(state.inner_state)
    counts = [c for c in jax.tree.leaves(new_state.inner_state) if jnp.issubdtype(c.dtype, jnp.integer)]
    assert [int(count) for count in counts] == [2, 2]  # adam's and the schedule's
    assert (new_state.scale, new_state.good_steps) == (512.0, 0)
    assert (new_state.skipped, new_state.consecutive_skips, bool(new_state.finite)) == (1, 1, False)

    later_params, later = step(new_params, new_state, gradient(0.125, params))
    assert (later.good_steps, later.skipped, later.consecutive_skips, bool(later.finite)) == (1, 1, 0, True)
    assert not np.array_equal(later_params["w"], new_params["w"])


def test_adamw_moves_nothing_on_a_skipped_step_weight_decay_included():
    tx = dynamic_loss_scaling(optax.adamw(1.0, weight_decay=0.5))
    params = start()
    updates, _ = tx.update(gradient(INF, params), tx.init(params), params)
    assert all(np.all(update == 0.0) for update in jax.tree.leaves(updates))


def test_a_skipped_step_keeps_the_sign_of_minus_zero():
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    params = {"w": jnp.array([-0.0, 0.0], jnp.float32)}
    updates, _ = tx.update(gradient(NAN, params), tx.init(params), params)
    assert np.signbit(optax.apply_updates(params, updates)["w"]).tolist() == [True, False]


def test_a_single_bad_element_among_many_skips_the_step():
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    params = {"a": jnp.ones(1000, jnp.float32), "b": jnp.ones((), jnp.float32)}
    grads = {"a": jnp.zeros(1000, jnp.float32).at[999].set(NAN), "b": jnp.ones((), jnp.float32)}
    assert not tx.update(grads, tx.init(params), params)[1].finite


# The scale


@pytest.mark.parametrize("bad", [1.0, INF])
def test_gradients_of_integers_and_missing_ones_pass_through(bad):
    params = {"w": jnp.ones(2), "i": jnp.arange(2), "none": None}
    grads = jax.grad(lambda p: jnp.sum(p["w"] * p["i"].astype(jnp.float32)) * bad, allow_int=True)(params)
    tx = dynamic_loss_scaling(optax.masked(optax.sgd(1.0), {"w": True, "i": False, "none": None}))
    updates, state = tx.update(grads, tx.init(params), params)
    assert (updates["i"].dtype, updates["none"]) == (jax.dtypes.float0, None)
    assert bool(state.finite) == (bad == 1.0)
    kept = where_finite(state, grads, {"w": jnp.zeros(2), "i": np.zeros(2, jax.dtypes.float0), "none": None})
    assert kept["i"].dtype == jax.dtypes.float0


def test_scale_doubles_after_exactly_n_good_steps():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=8.0, growth_interval=3)
    assert scales(tx, [True] * 7) == [8, 8, 16, 16, 16, 32, 32]


def test_a_bad_step_in_between_restarts_the_count():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=8.0, growth_interval=3)
    assert scales(tx, [True, True, False, True, True, True, True]) == [8, 8, 4, 4, 4, 8, 8]


def test_the_default_grows_at_step_2000():
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    state = tx.init(GOOD)._replace(good_steps=jnp.array(1998, jnp.int32))
    state = tx.update(GOOD, state)[1]
    assert (state.scale, state.good_steps) == (2.0**15, 1999)
    state = tx.update(GOOD, state)[1]
    assert (state.scale, state.good_steps) == (2.0**16, 0)


def test_the_gradient_applied_on_a_growth_step_is_the_true_one():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=8.0, growth_interval=1, growth_factor=4.0)
    params = {"w": jnp.array(0.0, jnp.float32)}
    updates, state = tx.update({"w": jnp.array(48.0, jnp.float32)}, tx.init(params), params)
    assert (updates["w"], state.scale) == (-6.0, 32.0)


def test_the_scale_never_becomes_inf():
    tx = dynamic_loss_scaling(
        optax.sgd(1.0), initial_scale=2.0**124, growth_interval=1, growth_factor=16.0, max_scale=2.0**127
    )
    assert scales(tx, [True, True, True, False, True]) == [2.0**127] * 3 + [2.0**126, 2.0**127]


def test_the_default_ceiling_and_floor_hold():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=2.0**23, growth_interval=1)
    assert scales(tx, [True, True, True]) == [2.0**24] * 3
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=4.0)
    assert scales(tx, [False] * 4) == [2.0, 1.0, 1.0, 1.0]


def test_a_large_step_is_cut_to_the_bounds_themselves():
    tx = dynamic_loss_scaling(
        optax.sgd(1.0), initial_scale=4.0, growth_interval=1, growth_factor=16.0, backoff_factor=2.0**-5,
        min_scale=2.0, max_scale=32.0,
    )  # fmt: skip
    assert scales(tx, [True, False, True, False]) == [32.0, 2.0, 32.0, 2.0]


def test_the_scale_can_reach_the_smallest_normal_number():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=2.0**-125, min_scale=2.0**-126)
    assert scales(tx, [False, False]) == [2.0**-126, 2.0**-126]


def test_forty_overflows_in_a_row_apply_nothing():
    tx = dynamic_loss_scaling(optax.adamw(0.1))
    step, params = feeder(tx), start()
    state = tx.init(params)
    inner = bits(state.inner_state)
    for _ in range(40):
        params, state = step(params, state, gradient(NAN, params))
    assert bits(params) == bits(start())
    assert bits(state.inner_state) == inner
    assert (state.scale, state.skipped, state.consecutive_skips, state.good_steps) == (1.0, 40, 40, 0)


def test_hysteresis_waits_for_consecutive_overflows_then_backs_off_at_each():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=64.0, hysteresis=3)
    assert scales(tx, [False, False, True, False, False, False, False]) == [64, 64, 64, 64, 64, 32, 16]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"initial_scale": 1e38}, "initial_scale a power of two"),
        ({"initial_scale": 65504.0}, "initial_scale a power of two from 2.-126 to 2.127, got 65504"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"initial_scale": -2.0}, "initial_scale"),
        ({"initial_scale": INF}, "initial_scale"),
        ({"initial_scale": NAN}, "initial_scale"),
        ({"initial_scale": 2.0**25}, "min_scale <= initial_scale <= max_scale"),
        ({"initial_scale": 0.5}, "min_scale <= initial_scale <= max_scale"),
        ({"min_scale": 2.0**-127, "initial_scale": 1.0}, "min_scale a power of two"),
        ({"min_scale": 3.0}, "min_scale a power of two"),
        ({"max_scale": 2.0**128}, "max_scale a power of two"),
        ({"max_scale": 65504.0}, "max_scale a power of two"),
        ({"growth_factor": 3.0}, "growth_factor a power of two"),
        ({"growth_factor": 1.0}, "growth_factor above 1"),
        ({"growth_factor": 0.5}, "growth_factor above 1"),
        ({"backoff_factor": 0.3}, "backoff_factor a power of two"),
        ({"backoff_factor": 0.0}, "backoff_factor a power of two"),
        ({"backoff_factor": 1.0}, "backoff_factor below 1"),
        ({"backoff_factor": 2.0}, "backoff_factor below 1"),
        ({"growth_interval": 0}, "growth_interval a whole number from 1"),
        ({"growth_interval": 2.5}, "growth_interval a whole number"),
        ({"growth_interval": INF}, "growth_interval a whole number"),
        ({"growth_interval": 2**31}, "growth_interval a whole number"),
        ({"hysteresis": 0}, "hysteresis a whole number"),
        ({"hysteresis": 1.5}, "hysteresis a whole number"),
        ({"tolerance": 1.0}, "tolerance from 0 up to, not including, 1, got 1.0"),
        ({"tolerance": -0.1}, "tolerance from 0"),
        ({"tolerance": NAN}, "tolerance from 0"),
    ],
)
def test_settings_that_cannot_keep_a_power_of_two_in_bounds_are_errors(setting, message):
    with pytest.raises(UsageError, match=message):
        dynamic_loss_scaling(optax.sgd(1.0), **setting)


@pytest.mark.parametrize("scale", [1000.0, 0.0, -1.0, INF, NAN, 2.0**128])
def test_a_static_scale_that_is_no_power_of_two_is_an_error(scale):
    with pytest.raises(ValueError, match="wanted scale a power of two"):
        static_loss_scaling(optax.sgd(1.0), scale)


def test_settings_may_be_whole_numbers_of_any_type():
    tx = dynamic_loss_scaling(
        optax.sgd(1.0), initial_scale=2**40, growth_interval=2.0, growth_factor=2, max_scale=2**41, hysteresis=1.0
    )
    assert scales(tx, [True, True, True, True, False]) == [2.0**40, 2.0**41, 2.0**41, 2.0**41, 2.0**40]
    dynamic_loss_scaling(optax.sgd(1.0), growth_interval=2**31 - 1)


def test_a_static_scale_never_changes_but_still_skips():
    tx = static_loss_scaling(optax.sgd(1.0), 128.0)
    assert scales(tx, [True, False, False, True]) == [128.0] * 4
    step, params = feeder(tx), start()
    params, state = step(params, tx.init(params), gradient(INF, params))
    assert bits(params) == bits(start())
    assert (state.skipped, state.consecutive_skips, state.good_steps, bool(state.finite)) == (1, 1, 0, False)
    _, state = step(params, state, gradient(1.0, params))
    assert (state.skipped, state.consecutive_skips, state.good_steps, bool(state.finite)) == (1, 0, 1, True)


def test_tolerance_waits_until_enough_of_the_steps_since_the_last_change_overflowed():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=64.0, growth_interval=4, tolerance=0.5)
    # One of three, two of four: the scale halves. Then one of one, and one of one again.
    assert scales(tx, [True, True, False, False, False, False]) == [64, 64, 64, 32, 16, 8]
    # Growth starts the count anew: of the four good steps none counts, of the two after it one overflowed.
    assert scales(tx, [True] * 5 + [False]) == [64, 64, 64, 128, 128, 64]
    # So does halving: of the three steps after it one overflowed.
    assert scales(tx, [False, True, True, False]) == [32, 32, 32, 32]


def test_tolerance_and_hysteresis_must_both_agree():
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=64.0, hysteresis=2, tolerance=0.25)
    assert scales(tx, [False, True, False, False, True]) == [64, 64, 64, 32, 32]
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=64.0, hysteresis=2, tolerance=0.75)
    assert scales(tx, [True, False, False, False, False]) == [64, 64, 64, 32, 16]


def test_a_share_that_is_exactly_the_tolerance_is_enough():
    """0.3 of 50 is 15, though the product of their float32 numbers is more."""
    tx = dynamic_loss_scaling(optax.sgd(1.0), initial_scale=64.0, tolerance=0.3)
    assert scales(tx, [True] * 35 + [False] * 15) == [64] * 49 + [32]


def test_a_tolerated_overflow_still_skips_its_step():
    tx = dynamic_loss_scaling(optax.adam(0.1), tolerance=0.9)
    step, params = feeder(tx), start()
    params, state = step(params, tx.init(params), gradient(1.0, params))
    new, after = step(params, state, gradient(INF, params))
    assert bits(new) == bits(params)
    assert bits(after.inner_state.inner_state) == bits(state.inner_state.inner_state)
    assert (after.scale, after.skipped, after.consecutive_skips, after.good_steps) == (2.0**15, 1, 1, 0)
    assert (after.inner_state.steps, after.inner_state.skipped) == (2, 1)


class Machine:
    """The rules of design section 4.3 in plain Python, written apart from the implementation."""

    def __init__(self, initial, interval, growth, backoff, low, high, patience, window=1, tolerance=Fraction(0)):
        self.scale, self.good, self.bad_run, self.skipped = initial, 0, 0, 0
        self.interval, self.growth, self.backoff = interval, growth, backoff
        self.low, self.high, self.patience, self.window = low, high, patience, window
        self.micro, self.applied = [], 0
        self.tolerance, self.since_change = tolerance, []

    def feed(self, good):
        self.micro.append(good)
        if len(self.micro) < self.window:
            return
        window_good, self.micro = all(self.micro), []
        self.since_change.append(window_good)
        if window_good:
            self.applied += 1
            self.bad_run = 0
            self.good += 1
            if self.good == self.interval:
                self.scale, self.good = min(self.high, self.scale * self.growth), 0
                self.since_change = []
        else:
            self.good = 0
            self.skipped += 1
            self.bad_run += 1
            share = Fraction(self.since_change.count(False), len(self.since_change))
            if self.bad_run >= self.patience and share >= self.tolerance:
                self.scale = max(self.low, self.scale * self.backoff)
                self.since_change = []


@settings(max_examples=25)
@given(
    sequence=st.lists(st.booleans(), min_size=1, max_size=40),
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0, 16.0]),
    backoff=st.sampled_from([0.5, 0.25, 2.0**-4]),
    low=st.integers(-6, 0),
    high=st.integers(4, 8),
    patience=st.integers(1, 3),
    window=st.integers(1, 3),
    tolerance=st.sampled_from(["0", "0.1", "0.25", "0.3", "0.5", "0.99"]),
)
@example([True] * 7 + [False] * 3, 20, 2.0, 0.5, -6, 4, 1, 1, "0.3")
def test_any_run_equals_a_plain_state_machine(
    sequence, interval, growth, backoff, low, high, patience, window, tolerance
):
    inner = optax.sgd(1.0)
    tx = dynamic_loss_scaling(
        optax.MultiSteps(inner, window) if window > 1 else inner,
        initial_scale=4.0, growth_interval=interval, growth_factor=growth, backoff_factor=backoff,
        min_scale=2.0**low, max_scale=2.0**high, hysteresis=patience, tolerance=float(tolerance),
    )  # fmt: skip
    machine = Machine(4.0, interval, growth, backoff, 2.0**low, 2.0**high, patience, window, Fraction(tolerance))
    params = {"w": jnp.zeros((), jnp.float32)}

    def step(carry, good):
        params, state = carry
        grads = {"w": jnp.where(good, state.scale, INF)}  # a true gradient of one
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (state.scale, state.good_steps, state.skipped, state.consecutive_skips, params["w"])

    _, seen = jax.lax.scan(step, (params, tx.init(params)), jnp.array(sequence))
    for scale, good, skipped, bad_run, w, fed in zip(*map(np.asarray, seen), sequence, strict=True):
        machine.feed(fed)
        assert (scale, good, skipped, bad_run) == (machine.scale, machine.good, machine.skipped, machine.bad_run)
        assert w == -machine.applied


# What the inner optimizer sees


def ten_steps(tx, jit):
    x = jnp.linspace(-1.0, 2.0, 32 * 8, dtype=jnp.float32).reshape(32, 8)

    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1.0) ** 2)

    def step(params, state):
        grads = scaled_value_and_grad(loss)(state, params)[1] if hasattr(state, "scale") else jax.grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.sin(jnp.arange(128.0).reshape(8, 16)), "v": jnp.cos(jnp.arange(64.0).reshape(16, 4))}
    state = tx.init(params)
    step = jax.jit(step) if jit else step
    for _ in range(10):
        params, state = step(params, state)
    return params


INNERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", INNERS)
def test_with_any_power_of_two_ten_steps_are_the_same_bit_for_bit(name):
    inner = INNERS[name]
    unscaled = bits(ten_steps(static_loss_scaling(inner, 1.0), jit=True))
    for scale in (2.0**-10, 2.0**15, 2.0**20):
        assert bits(ten_steps(static_loss_scaling(inner, scale), jit=True)) == unscaled


@pytest.mark.parametrize("name", INNERS)
def test_ten_steps_equal_those_of_the_bare_optimizer_bit_for_bit(name):
    # Operation by operation: in a compiled step XLA may round a product and a sum once or twice, as it fuses them.
    inner = INNERS[name]
    assert bits(ten_steps(dynamic_loss_scaling(inner, growth_interval=3), jit=False)) == bits(
        ten_steps(inner, jit=False)
    )


def test_at_the_largest_scale_the_unscaled_gradient_is_exact():
    seen = optax.trace(0.0)
    tx = static_loss_scaling(seen, 2.0**127)
    params = {"w": jnp.zeros(3, jnp.float32)}
    true = jnp.array([1.2345678, 2.0**-126, -1.0], jnp.float32)
    updates, _ = jax.jit(tx.update)({"w": true * jnp.float32(2.0**127)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], true)


def test_a_twin_run_without_the_overflowed_step_is_the_same():
    tx = dynamic_loss_scaling(optax.adam(0.1), initial_scale=128.0, growth_interval=1)
    step, params, twin = feeder(tx), start(), start()
    state, plain = tx.init(params), no_loss_scaling(optax.adam(0.1))
    twin_state = plain.init(twin)
    for number, value in enumerate([0.25, INF, -0.5, 0.125], start=1):
        params, state = step(params, state, gradient(value, params))
        if number != 2:
            updates, twin_state = plain.update(gradient(value, twin), twin_state, twin)
            twin = optax.apply_updates(twin, updates)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(twin), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert state.scale == 128.0 * 2.0**3 * 0.5


@pytest.mark.parametrize(
    "hider", [optax.clip(1.0), optax.clip_by_global_norm(1.0), optax.zero_nans(), optax.adaptive_grad_clip(0.1)]
)
def test_no_transform_in_the_chain_can_hide_an_overflow(hider):
    tx = dynamic_loss_scaling(optax.chain(hider, optax.sgd(1.0)))
    params = start()
    step = feeder(tx)
    for bad in (INF, NAN):
        grads = {"w": gradient(bad, params)["w"], "b": gradient(1.0, params)["b"]}
        new, state = step(params, tx.init(params), grads)
        assert bits(new) == bits(params)
        assert state.scale == 2.0**14


LENGTH = 12


@functools.cache
def trajectories(name):
    """Compiled: parameters of a run that overflows in given steps, and of a plain float32 run that leaves those out."""
    inner = {**INNERS, "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))}[name]
    tx = dynamic_loss_scaling(inner, initial_scale=256.0, growth_interval=2)
    x = jnp.linspace(-1.0, 2.0, LENGTH * 8 * 4, dtype=jnp.float32).reshape(LENGTH, 8, 4)
    params = {"w": jnp.sin(jnp.arange(8.0, dtype=jnp.float32)).reshape(4, 2), "v": jnp.ones((2, 1), jnp.float32)}

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1.0) ** 2)

    def scaled_step(carry, given):
        (params, state), (x, bad) = carry, given
        grads = scaled_value_and_grad(lambda params: jnp.where(bad, INF, 1.0) * loss(params, x))(state, params)[1]
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def plain_step(carry, given):
        def apply(params, state):
            with jax.numpy_dtype_promotion("standard"):
                updates, state = inner.update(jax.grad(loss)(params, given[0]), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.cond(given[1], lambda *same: same, apply, *carry), None

    @jax.jit
    def run(bad):
        (scaled, state), _ = jax.lax.scan(scaled_step, (params, tx.init(params)), (x, bad))
        (plain, inner_state), _ = jax.lax.scan(plain_step, (params, inner.init(params)), (x, bad))
        return (scaled, state.inner_state), (plain, inner_state), state.skipped

    return run


@pytest.mark.parametrize("name", INNERS)
@settings(max_examples=15)
@given(bad=st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH))
def test_wherever_overflows_fall_the_run_equals_a_float32_run_without_those_steps(name, bad):
    scaled, plain, skipped = trajectories(name)(jnp.array(bad))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), scaled, plain)
    assert skipped == sum(bad)


def test_clipping_sees_the_unscaled_norm():
    tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    params = {"w": jnp.zeros(3, jnp.float32)}
    new, _ = feeder(tx)(params, tx.init(params), {"w": jnp.array([1.0, 1.0, 0.5], jnp.float32)})
    np.testing.assert_allclose(new["w"], [-2 / 3, -2 / 3, -1 / 3], rtol=1e-6)


def test_float16_gradients_are_unscaled_in_float32():
    tx = static_loss_scaling(optax.trace(0.0), 65536.0)
    params = {"w": jnp.zeros(1, jnp.float16)}
    updates, _ = tx.update({"w": jnp.array([1e-3], jnp.float16)}, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32
    np.testing.assert_allclose(updates["w"], [1e-3 / 65536], rtol=1e-3)


def test_ten_float16_gradients_of_300_have_norm_948_7():
    norms = []

    def record(updates, state, params=None):
        norms.append(float(optax.tree.norm(updates)))
        return updates, state

    tx = static_loss_scaling(optax.GradientTransformation(lambda params: optax.EmptyState(), record), 1.0)
    params = {"w": jnp.zeros(10, jnp.float16)}
    tx.update({"w": jnp.full(10, 300.0, jnp.float16)}, tx.init(params), params)
    assert norms == [pytest.approx(948.683, abs=1e-3)]


@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.MultiSteps(optax.adam(0.1), 2),
        master_weights(optax.adam(0.1)),
        optax.chain(optax.trace(0.9), master_weights(optax.adam(0.1))),
        optax.MultiSteps(master_weights(optax.adam(0.1)), 2),
        master_weights(optax.MultiSteps(optax.adam(0.1), 2)),
    ],
    ids=["adam", "momentum", "accumulated", "masters", "chained masters", "accumulated masters", "masters accumulated"],
)
def test_with_half_precision_parameters_moments_are_float32_from_the_start_and_stay_so(inner):
    tx = dynamic_loss_scaling(inner)
    params = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.bfloat16)}
    state, update = tx.init(params), jax.jit(tx.update)
    born = jax.tree.map(lambda leaf: leaf.dtype, state)
    check_dtypes(state, "float32", name="optimizer state")
    for _ in range(3):
        updates, state = update(gradient(1.0, params), state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == born
        assert (params["w"].dtype, params["v"].dtype) == (jnp.float16, jnp.bfloat16)


def test_an_inner_transform_that_tells_dtypes_apart_is_left_alone():
    def is_half(params):
        return jax.tree.map(lambda p: p.dtype == jnp.float16, params)

    tx = dynamic_loss_scaling(optax.masked(optax.adam(0.1), is_half))
    state = tx.init({"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.float32)})
    mu = state.inner_state.inner_state[0].mu
    assert isinstance(mu["v"], optax.MaskedNode)
    assert mu["w"].shape == (2,)


@pytest.mark.parametrize(
    "inner", [optax.adam(0.1), optax.adamw(0.1, weight_decay=0.0), optax.rmsprop(0.1), optax.adagrad(0.1)]
)
def test_zero_gradients_give_zero_updates(inner):
    tx = dynamic_loss_scaling(inner)
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(gradient(0.0, params), state, params)
        assert np.all(updates["w"] == 0.0)
    assert state.finite


def test_complex_gradients_are_unscaled_part_by_part():
    tx = static_loss_scaling(optax.trace(0.0), 2.0**127)
    params = {"w": jnp.zeros(1, jnp.complex64)}
    grads = {"w": jnp.array([complex(2.0**127, -(2.0**126))], jnp.complex64)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert (updates["w"][0], bool(state.finite)) == (1.0 - 0.5j, True)


def test_extra_arguments_reach_the_inner_transform():
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda u: u * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    for tx in (dynamic_loss_scaling(inner), static_loss_scaling(inner, 1.0), no_loss_scaling(inner)):
        updates, _ = tx.update(
            {"w": jnp.ones(1, jnp.float32)}, tx.init(GOOD)._replace(scale=jnp.float32(1)), factor=3.0
        )
        assert updates["w"] == 3.0


# No loss scaling


def test_no_loss_scaling_adds_no_operation():
    inner = optax.adamw(optax.cosine_decay_schedule(0.1, 100), weight_decay=0.1)
    tx, params = no_loss_scaling(inner), start()
    with jax.numpy_dtype_promotion("standard"):
        plain = jax.make_jaxpr(inner.update)(params, inner.init(params), params)
    wrapped = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert [str(eqn.primitive) for eqn in wrapped.jaxpr.eqns] == [str(eqn.primitive) for eqn in plain.jaxpr.eqns]
    assert [eqn.params.keys() for eqn in wrapped.jaxpr.eqns] == [eqn.params.keys() for eqn in plain.jaxpr.eqns]
    assert len(plain.jaxpr.eqns) > 10


def test_no_loss_scaling_has_the_same_state_and_skips_nothing():
    tx = no_loss_scaling(optax.sgd(1.0))
    state = tx.init(GOOD)
    updates, after = tx.update(BAD, state)
    assert updates["w"].tolist() == [-INF, -1.0]
    assert bits(after) == bits(state)
    assert jax.tree.structure(state) == jax.tree.structure(dynamic_loss_scaling(optax.sgd(1.0)).init(GOOD))
    assert scale_loss(jnp.float32(3.0), state) == 3.0


# Accumulation


def accumulate(tx, params, micro_batches):
    step, states = feeder(tx), [tx.init(params)]
    for value in micro_batches:
        params, state = step(params, states[-1], gradient(value, params))
        states.append(state)
    return params, states[1:]


def test_four_micro_batches_equal_one_large_batch():
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
    many, _ = accumulate(dynamic_loss_scaling(optax.MultiSteps(inner, 4)), start(), [0.5, 1.5, -0.5, 0.5] * 2)
    one, _ = accumulate(dynamic_loss_scaling(inner), start(), [0.5, 0.5])
    for ours, theirs in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert bits(one) != bits(start())


@pytest.mark.parametrize(("position", "bad"), [(0, NAN), (1, INF), (2, NAN), (2, INF)])
def test_an_overflow_in_any_micro_batch_discards_the_window_once_and_poisons_nothing(position, bad):
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.adam(0.1), 3), initial_scale=64.0)
    window = [0.5, 0.25, 1.5]
    window[position] = bad
    params, states = accumulate(tx, start(), [0.5, 1.0, 1.5, *window, 0.5, 1.0, 1.5])
    clean, clean_states = accumulate(tx, start(), [0.5, 1.0, 1.5, 0.5, 1.0, 1.5])
    assert bits(params) == bits(clean)
    assert bits(states[-1].inner_state) == bits(clean_states[-1].inner_state)
    assert [float(state.scale) for state in states] == [64.0] * 5 + [32.0] * 4
    assert [int(state.skipped) for state in states] == [0] * 5 + [1] * 4
    assert [int(state.good_steps) for state in states] == [0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert [bool(state.finite) for state in states[3:6]] == [i < position for i in range(3)]


def test_every_micro_batch_of_a_window_can_overflow():
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.adam(0.1), 2), initial_scale=64.0)
    params, states = accumulate(tx, start(), [INF, NAN, INF, INF])
    assert bits(params) == bits(start())
    assert [float(state.scale) for state in states] == [64.0, 32.0, 32.0, 16.0]
    assert int(states[-1].inner_state.gradient_step) == 0


def test_an_accumulator_that_skips_overflows_by_itself_does_not_hold_the_scale_up():
    inner = optax.MultiSteps(optax.sgd(0.5), 2, should_skip_update_fn=optax.skip_not_finite)
    params, states = accumulate(dynamic_loss_scaling(inner, initial_scale=64.0), start(), [INF] * 4 + [1.0] * 2)
    assert [float(state.scale) for state in states] == [64.0, 32.0, 32.0, 16.0, 16.0, 16.0]
    assert params["w"].tolist() == [0.0, -0.75]


def test_the_scale_grows_between_windows_only():
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.sgd(0.1), 2), initial_scale=4.0, growth_interval=2)
    _, states = accumulate(tx, start(), [1.0] * 6)
    assert [float(state.scale) for state in states] == [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]


def test_two_accumulators_are_an_error():
    inner = optax.chain(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
                        optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())  # fmt: skip
    tx = dynamic_loss_scaling(inner)
    with pytest.raises(UsageError, match=r"one optax.MultiSteps inside, found several"):
        tx.update(GOOD, tx.init(GOOD), GOOD)


# The state


@pytest.mark.parametrize(
    "tx",
    [
        dynamic_loss_scaling(optax.sgd(1.0)),
        dynamic_loss_scaling(optax.sgd(1.0), tolerance=0.5),
        static_loss_scaling(optax.sgd(1.0), 4),
        no_loss_scaling(optax.sgd(1.0)),
    ],
)
def test_every_field_is_a_strongly_typed_array_from_birth(tx):
    state = tx.init(GOOD)
    dtypes = {"scale": "float32", "good_steps": "int32", "skipped": "int32", "consecutive_skips": "int32",
              "finite": "bool"}  # fmt: skip
    for field, dtype in dtypes.items():
        value = getattr(state, field)
        assert isinstance(value, jax.Array)
        assert (value.dtype, value.shape, value.weak_type) == (np.dtype(dtype), (), False)
    assert state._fields == (*dtypes, "inner_state")
    after = jax.eval_shape(lambda s: tx.update(GOOD, s)[1], state)
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), after) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.weak_type), jax.eval_shape(lambda s: s, state)
    )


def unusual_state():
    """Another value in every field than a fresh state has."""
    tx = dynamic_loss_scaling(optax.adam(0.1))
    inner = jax.tree.map(lambda leaf: leaf + jnp.asarray(3, leaf.dtype), tx.init(GOOD).inner_state)
    return LossScaleState(
        jnp.float32(2.0**-9), jnp.int32(7), jnp.int32(11), jnp.int32(2), jnp.asarray(False), inner
    ), tx.init(GOOD)


def assert_same(restored, state):
    assert isinstance(restored, LossScaleState)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_the_state_survives_tree_map_with_none_and_strings():
    state, _ = unusual_state()
    assert jax.tree.map(lambda _: None, state).scale is None
    words = jax.tree.map(lambda _: "replicated", state)
    assert (words.finite, words.inner_state[0].count) == ("replicated", "replicated")
    assert_same(jax.tree.map(lambda leaf: leaf, state), state)


def test_the_state_survives_jit_and_eval_shape():
    state, _ = unusual_state()
    assert_same(jax.jit(lambda s: s)(state), state)
    shapes = jax.eval_shape(lambda s: s, state)
    assert (shapes.scale.dtype, shapes.good_steps.dtype, shapes.finite.dtype) == (jnp.float32, jnp.int32, jnp.bool_)


def test_the_state_survives_flax_serialization():
    state, fresh = unusual_state()
    assert_same(flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)), state)
    assert flax.serialization.to_state_dict(state).keys() == set(LossScaleState._fields)


def test_the_state_survives_orbax(tmp_path):
    state, fresh = unusual_state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda s: s, fresh))
    assert_same(restored, state)


def test_a_restored_state_goes_on_as_the_saved_one():
    state, fresh = unusual_state()
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))
    tx = dynamic_loss_scaling(optax.adam(0.1), initial_scale=2.0**-9, min_scale=2.0**-10, hysteresis=3)
    for grads in (BAD, GOOD):
        assert bits(tx.update(grads, restored, GOOD)) == bits(tx.update(grads, state, GOOD))
    assert tx.update(BAD, state, GOOD)[1].scale == 2.0**-10  # the third overflow in a row


# At run time


def test_a_hundred_steps_dispatch_without_a_host_read():
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.adam(0.1), 2), growth_interval=3)
    step, params = feeder(tx), start()
    state = tx.init(params)
    good, bad = gradient(0.5, params), gradient(INF, params)
    step(params, state, good)
    with jax.transfer_guard("disallow"):
        for number in range(100):
            params, state = step(params, state, bad if number % 10 == 3 else good)
    assert state.skipped == 10


def test_one_trace_serves_growth_backoff_and_skips():
    tx = dynamic_loss_scaling(optax.adam(0.1), growth_interval=2)
    step, params = feeder(tx), start()
    state = tx.init(params)
    for value in (1.0, 1.0, INF, NAN, 1.0):
        params, state = step(params, state, gradient(value, params))
    assert step._cache_size() == 1


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)])
def test_a_fresh_state_can_be_donated(inner):
    tx = dynamic_loss_scaling(inner)
    step, state = jax.jit(tx.update, donate_argnums=1), tx.init(GOOD)
    for _ in range(2):
        _, state = step(BAD, state, GOOD)
    assert state.finite == jnp.asarray(False)


def test_an_update_outside_jit_equals_one_inside():
    tx = dynamic_loss_scaling(optax.sgd(0.5, momentum=0.5), initial_scale=4.0, growth_interval=1)
    state = tx.init(GOOD)
    for grads in (GOOD, BAD):
        assert bits(tx.update(grads, state, GOOD)) == bits(jax.jit(tx.update)(grads, state, GOOD))


@pytest.mark.parametrize("bad_device", [0, 1])
def test_under_shard_map_an_overflow_on_one_device_makes_both_skip(bad_device):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = dynamic_loss_scaling(optax.sgd(1.0), axis_name="data")
    state = tx.init({"w": jnp.zeros(1, jnp.float32)})

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data"), P()))
    def step(grads):
        updates, new = tx.update({"w": grads}, state)
        return updates["w"], new.finite[None] & (grads == grads), new.scale

    updates, finite, scale = step(jnp.array([1.0, 2.0], jnp.float32).at[bad_device].set(INF))
    assert updates.tolist() == [0.0, 0.0]
    assert finite.tolist() == [False, False]
    assert scale == 2.0**14
    updates, finite, scale = step(jnp.array([2.0**15, 2.0**16], jnp.float32))
    assert (updates.tolist(), finite.tolist(), float(scale)) == ([-1.0, -2.0], [True, True], 2.0**15)


def test_under_jit_a_bad_shard_of_a_gradient_skips_the_whole_step():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    tx = dynamic_loss_scaling(optax.sgd(1.0))
    params = {"w": jax.device_put(jnp.ones(4, jnp.float32), sharding)}
    grads = {"w": jax.device_put(jnp.ones(4, jnp.float32).at[3].set(NAN), sharding)}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert (updates["w"].tolist(), bool(state.finite)) == ([0.0] * 4, False)


def test_with_a_scale_each_an_overflow_of_one_optimizer_leaves_the_other_alone():
    tx = optax.partition({"a": dynamic_loss_scaling(optax.sgd(1.0)), "b": dynamic_loss_scaling(optax.sgd(1.0))},
                         {"w": "a", "b": "b"})  # fmt: skip
    params = start()
    updates, state = tx.update({"w": gradient(2.0**15, params)["w"], "b": gradient(INF, params)["b"]}, tx.init(params))
    assert (updates["w"].tolist(), updates["b"].tolist()) == ([-1.0, -1.0], [0.0, 0.0])
    assert [float(loss_scale_state(state.inner_states[name]).scale) for name in "ab"] == [2.0**15, 2.0**14]


def test_an_nnx_optimizer_skips_an_overflow():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dynamic_loss_scaling(optax.adam(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: scale_loss(jnp.mean(m(x)), optimizer.opt_state))(model)
        optimizer.update(model, grads)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step(model, optimizer, jnp.ones((1, 2), jnp.float32))
        moved = np.asarray(model.kernel.get_value())
        step(model, optimizer, jnp.full((1, 2), INF, jnp.float32))
    np.testing.assert_array_equal(model.kernel.get_value(), moved)
    state = loss_scale_state(optimizer.opt_state)
    assert (state.scale[...], state.skipped[...], state.inner_state[0].count[...]) == (2.0**14, 1, 1)
    assert where_finite(optimizer.opt_state, jnp.float32(1.0), jnp.float32(0.0)) == 0.0


@pytest.mark.parametrize("outer", [dynamic_loss_scaling, lambda tx: static_loss_scaling(tx, 8.0)])
def test_wrapping_an_optimizer_twice_is_an_error(outer):
    with pytest.raises(UsageError, match="wanted one wrapper around an optimizer"):
        outer(optax.chain(dynamic_loss_scaling(optax.sgd(1.0)))).init(GOOD)


@pytest.mark.parametrize("outer", [dynamic_loss_scaling, no_loss_scaling, lambda tx: static_loss_scaling(tx, 8.0)])
@pytest.mark.parametrize("inner", [dynamic_loss_scaling, no_loss_scaling])
def test_a_wrapper_inside_another_is_refused(outer, inner):
    """Else gradients are divided twice, and what is restored after a skipped step follows the wrong flag."""
    with pytest.raises(UsageError, match="wanted one wrapper around an optimizer, got a second inside"):
        outer(optax.chain(inner(optax.sgd(1.0)))).init(GOOD)
