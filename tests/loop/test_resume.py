"""A checkpoint of any policy into a state of any other."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mpjax.config import Precision
from mpjax.errors import PrecisionWarning, UsageError
from mpjax.loop import adopt, places_in, to_arrays
from mpjax.precision import half_moments, no_loss_scaling
from mpjax.precision.float8 import float8_moments, grouped, ungrouped
from mpjax.training import TrainState, has_moments_of, make_mesh, plan_precision, with_precision


POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
FINE = 1.0001  # float16 and bfloat16 round it to 1
STEPS = 6


def state_of(policy, value=0.0, *, inner=None, ema=False, **precision):
    """A state whose parameters, moments, statistics and counters all tell `value`."""
    config = Precision(policy=policy, **precision)
    plan = plan_precision(config)
    tx = with_precision(inner or optax.adam(0.1), config, loss_scale=plan.loss_scale, weights=plan.weights)
    fine = {"head/kernel": jnp.full((2, 3), value, jnp.float32), "head/bias": jnp.full(3, -value, jnp.float32)}
    params = jax.tree.map(lambda p: p.astype(plan.policy.param_dtype), fine)
    opt_state = tx.init(params)
    if plan.master_weights:
        opt_state = opt_state._replace(inner_state=opt_state.inner_state._replace(masters=fine))
    opt_state = (
        optax.tree.map_params(tx, lambda leaf: leaf + jnp.asarray(value / 4, leaf.dtype), opt_state)
        if (value and not plan.master_weights)
        else opt_state
    )
    counted = {"good_steps": jnp.int32(5), "skipped": jnp.int32(2), "scale": jnp.float32(4096)} if value else {}
    return TrainState(
        step=jnp.int32(STEPS if value else 0),
        params=params,
        stats={"norm/mean": jnp.full(3, 7 * value, jnp.float32)},
        opt_state=opt_state._replace(**counted),
        ema=dict(fine) if ema else {},
    )


def saved_of(state):
    return {path: np.asarray(leaf) for path, leaf in to_arrays(state).items()}


@pytest.mark.parametrize("into", POLICIES)
@pytest.mark.parametrize("written", POLICIES)
def test_any_policy_loads_under_any_other(written, into):
    """Float32 values come from master weights where there are any, and go into them where there are."""
    saved, fresh = saved_of(state_of(written, FINE)), state_of(into)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = adopt(fresh, saved, same_scaling=("float16" in written) == ("float16" in into))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(fresh), strict=True):
        assert (leaf.dtype, leaf.shape, leaf.sharding) == (like.dtype, like.shape, like.sharding), path
    wanted = jnp.asarray(FINE, fresh.params["head/kernel"].dtype)
    assert (state.params["head/kernel"] == wanted).all()
    if into in ("bfloat16", "float16"):
        assert (state.opt_state.inner_state.masters["head/kernel"] == jnp.float32(FINE)).all()
    assert (state.stats["norm/mean"] == jnp.float32(7) * jnp.float32(FINE)).all()
    assert (int(state.step), int(state.attempts)) == (6, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_policy_gives_every_bit(policy):
    written = state_of(policy, FINE, ema=True)
    state = adopt(state_of(policy, ema=True), saved_of(written))
    for one, other in zip(jax.tree.leaves(written), jax.tree.leaves(state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert float(state.opt_state.scale) == 4096


# Weights with a compensation: the exact value is the sum, 1 + 1e-4 = 1.0001 to 16 bits.

KAHAN = {"master_weights": "kahan"}


def compensated(policy):
    state = state_of(policy, FINE, **KAHAN)
    half = state.params["head/kernel"].dtype
    rest = {name: jnp.asarray(jnp.sign(p) * (FINE - 1), half) for name, p in state.params.items()}
    inner_state = state.opt_state.inner_state._replace(compensation=rest)
    return dataclasses.replace(state, opt_state=state.opt_state._replace(inner_state=inner_state))


def adopted(into, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return adopt(into, saved_of(saved), same_scaling=False)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_compensated_weights_are_exact_as_wider_weights_and_as_masters(half):
    exact = 1 + np.float32(jnp.asarray(FINE - 1, half))
    wide = adopted(state_of("float32"), compensated(half))
    assert (wide.params["head/kernel"] == exact).all()
    assert (wide.params["head/bias"] == -exact).all()
    copies = adopted(state_of(half), compensated(half))
    assert (copies.opt_state.inner_state.masters["head/kernel"] == exact).all()
    assert (copies.params["head/kernel"] == 1).all()


@pytest.mark.parametrize("written", [*POLICIES, "kahan"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_what_rounding_leaves_over_of_any_checkpoint_becomes_the_compensation(written, half):
    saved = compensated("float16") if written == "kahan" else state_of(written, FINE)
    state = adopted(state_of(half, **KAHAN), saved)
    assert (state.params["head/kernel"] == 1).all()
    rest = state.opt_state.inner_state.compensation["head/kernel"]
    assert str(rest.dtype) == half
    np.testing.assert_allclose(np.asarray(rest, np.float32), 1e-4, rtol=0.004)


def test_compensated_weights_come_back_every_bit():
    written = compensated("bfloat16")
    state = adopted(state_of("bfloat16", **KAHAN), written)
    for name in ("params", "stats"):
        assert all((getattr(state, name)[path] == x).all() for path, x in getattr(written, name).items())
    rest = state.opt_state.inner_state.compensation["head/kernel"]
    assert (rest == written.opt_state.inner_state.compensation["head/kernel"]).all()


def test_stochastic_weights_go_on_with_other_random_numbers():
    state = adopted(state_of("bfloat16", master_weights="stochastic"), state_of("float32", FINE))
    assert int(state.opt_state.inner_state.roundings) == STEPS


def test_another_kind_of_scaling_starts_afresh():
    state = adopt(state_of("mixed_float16"), saved_of(state_of("float32", FINE)), same_scaling=False)
    assert (float(state.opt_state.scale), int(state.opt_state.good_steps)) == (32768, 0)
    assert int(state.opt_state.skipped) == 2


def test_moments_survive_a_change_of_policy():
    saved = saved_of(state_of("float32", FINE))
    plain = adopt(state_of("mixed_float16"), saved)
    masters = adopt(state_of("float16"), saved)
    for moments in (plain.opt_state.inner_state[0].mu, masters.opt_state.inner_state.inner_state[0].mu):
        assert (moments["head/kernel"] == jnp.float32(FINE / 4)).all()


def test_one_without_scaler_state_loads_with_a_warning():
    scaler = ("scale", "good_steps", "consecutive_skips", "finite")
    saved = saved_of(state_of("mixed_float16", FINE))
    saved = {path: value for path, value in saved.items() if path not in {f"opt_state/{name}" for name in scaler}}
    with pytest.warns(PrecisionWarning, match="has no loss-scale state: the scale starts at its initial value"):
        state = adopt(state_of("mixed_float16"), saved)
    assert float(state.opt_state.scale) == 32768
    assert (state.params["head/kernel"] == jnp.float32(FINE)).all()


def test_another_optimizer_starts_afresh_and_says_so():
    fresh = state_of("float32", inner=optax.sgd(0.1, momentum=0.9))
    with pytest.warns(
        PrecisionWarning, match=r"not in the checkpoint, so they start afresh: opt_state/inner_state/0/tra"
    ):
        state = adopt(fresh, saved_of(state_of("float32", FINE)))
    assert not state.opt_state.inner_state[0].trace["head/kernel"].any()


@pytest.mark.parametrize("written", ["float32", "float16"])
def test_a_moving_average_that_was_not_kept_starts_at_the_parameters(written):
    state = adopt(state_of(written, ema=True), saved_of(state_of(written, FINE)))
    assert (state.ema["head/kernel"] == jnp.float32(FINE)).all()


def test_another_model_is_refused_with_all_faults():
    saved = saved_of(state_of("float32", FINE))
    saved["params/head/kernel"] = np.zeros((2, 4), np.float32)
    saved["params/blocks/0/kernel"] = np.zeros(1, np.float32)
    del saved["params/head/bias"], saved["stats/norm/mean"]
    with pytest.raises(UsageError) as raised:
        adopt(state_of("float32"), saved)
    assert str(raised.value).splitlines() == [
        "the checkpoint is of another model:",
        "  missing: params/head/bias",
        "  missing: stats/norm/mean",
        "  unexpected: params/blocks/0/kernel",
        "  shape: params/head/kernel is (2, 4), wanted (2, 3)",
    ]


def test_a_long_list_of_faults_is_cut():
    saved = {**saved_of(state_of("float32", FINE)), **{f"params/{i}": np.zeros(1) for i in range(30)}}
    with pytest.raises(UsageError, match=r"and 10 more$"):
        adopt(state_of("float32"), saved)


def test_values_that_do_not_fit_are_counted():
    saved = saved_of(state_of("float32", FINE))
    saved["params/head/kernel"] = np.array([[1e6, 1e-9, 1], [1e5, 0, -1e6]], np.float32)
    with pytest.warns(PrecisionWarning, match="params/head/kernel: 3 overflow, 1 flush to zero in float16"):
        adopt(state_of("float16", master_weights="off"), saved, same_scaling=False)


def test_a_schedule_that_is_new_to_the_run_goes_on_where_the_run_is():
    saved = to_arrays(state_of("float32", 1.0, inner=optax.sgd(0.1)))
    fresh = state_of("float32", inner=optax.sgd(optax.linear_schedule(1.0, 0.0, 100)))
    state = adopt(fresh, saved)
    counts = [leaf for name, leaf in to_arrays(state).items() if name.endswith("/count")]
    assert [int(count) for count in counts] == [STEPS]


@pytest.mark.parametrize("before", ["sgd", "lion"])
def test_moments_of_another_rule_start_afresh_with_their_counter(before):
    """Adam divides them by what the counter says: at step 6, new squares would be taken for sums of six."""
    saved = to_arrays(state_of("float32", 1.0, inner=getattr(optax, before)(0.1)))
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    with pytest.warns(PrecisionWarning, match="so they start afresh: opt_state/inner_state/0/count"):
        state = adopt(state_of("float32", inner=optax.adam(schedule)), saved)
    moments, _ = state.opt_state.inner_state
    assert int(moments.count) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((moments.mu, moments.nu)))
    assert int(state.opt_state.inner_state[1].count) == STEPS


def test_moments_of_another_meaning_start_afresh_and_masters_and_schedules_go_on():
    """Adam after ADOPT, whose first moments are divided already, would take steps hundreds of times too long."""
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    saved = to_arrays(state_of("float16", 1.0, inner=optax.contrib.adopt(schedule)))
    with pytest.warns(PrecisionWarning, match="so they start afresh: opt_state/inner_state/0/count"):
        state = adopt(state_of("float16", inner=optax.adam(schedule)), saved, same_scaling=False, same_moments=False)
    moments, counted = state.opt_state.inner_state.inner_state
    assert (int(moments.count), int(counted.count)) == (0, STEPS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((moments.mu, moments.nu)))
    assert (state.opt_state.inner_state.masters["head/kernel"] == 1).all()


def test_which_rules_have_the_same_moments():
    assert has_moments_of("adamw", "lamb")
    assert has_moments_of("lion", "own.py:rule")
    assert has_moments_of("adamaxw", "adamax")
    assert not has_moments_of("adamw", "adopt")
    assert not has_moments_of("adopt", "adabelief")
    assert not has_moments_of("adamax", "rmsprop")


def test_moments_of_parameters_that_were_frozen_do_not_take_the_counter_of_the_others_back():
    whole = state_of("float32", 1.0)
    saved = {name: leaf for name, leaf in saved_of(whole).items() if not ("head/bias" in name and "/0/" in name)}
    counted = {name: np.asarray(7, leaf.dtype) if name.endswith("/count") else leaf for name, leaf in saved.items()}
    with pytest.warns(PrecisionWarning, match="start afresh: opt_state/inner_state/0/mu/head/bias"):
        state = adopt(state_of("float32"), counted)
    assert int(state.opt_state.inner_state[0].count) == 7
    assert float(state.opt_state.inner_state[0].mu["head/kernel"][0, 0]) == 0.25


@pytest.mark.parametrize("weights", ["copies", "kahan"])
def test_blocks_of_which_one_was_frozen_are_stacked_with_all_their_weights(weights):
    """A frozen block has no master weight, compensation or average; the others' do not become initial values."""
    config = Precision(policy="bfloat16")
    rule = with_precision(optax.sgd(0.1), config, loss_scale="none", weights=weights)

    def state(params, kept):
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        opt_state = rule.init({name: low[name] for name in kept})
        return TrainState(jnp.int32(0), low, {}, opt_state, {name: params[name] for name in kept})

    blocks = {f"blocks/{number}/k": jnp.full(2, number + FINE) for number in range(3)}
    saved = saved_of(state(blocks, ["blocks/1/k", "blocks/2/k"]))
    field = "masters" if weights == "copies" else "compensation"
    exact = FINE if weights == "copies" else FINE - 1
    changed = f"opt_state/inner_state/{field}/blocks/2/k"
    saved[changed] = saved[changed] + np.asarray(exact, saved[changed].dtype)
    fresh = state({"blocks/all/k": jnp.zeros((3, 2))}, ["blocks/all/k"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = to_arrays(adopt(fresh, saved))
    rows = {
        name: np.asarray(resumed[name], np.float32)[:, 0]
        for name in ("ema/blocks/all/k", f"opt_state/inner_state/{field}/blocks/all/k")
    }
    np.testing.assert_allclose(rows.pop("ema/blocks/all/k"), [1, 1 + FINE, 2 + FINE], rtol=1e-6)
    wanted = [1, 2, 4] if weights == "copies" else [0, 0, 1e-4]
    np.testing.assert_allclose(next(iter(rows.values())), wanted, rtol=0.004)


def test_an_array_of_a_checkpoint_belongs_where_its_like_is():
    mesh = make_mesh(fsdp=2, data=1)
    cut, whole = NamedSharding(mesh, PartitionSpec(None, "fsdp")), NamedSharding(mesh, PartitionSpec())
    kernel = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=cut)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    place = places_in(TrainState(step, {"head/kernel": kernel}, {}, {}, {}))
    assert place("params/head/kernel", (4, 8)) == cut
    assert place("opt_state/inner_state/inner_state/masters/head/kernel", (4, 8)) == cut  # which the state lacks
    assert place("ema/head/kernel", (4, 8)) == cut
    assert place("ema/head/kernel", (8, 4)) == whole
    assert place("opt_state/scale", ()) == whole


@pytest.mark.parametrize("into", POLICIES)
def test_arrays_on_the_devices_are_adopted_as_those_on_the_host(into):
    """With the same warnings of values that overflow."""
    mesh = make_mesh(fsdp=2, data=1)
    parts = {(3,): PartitionSpec(), (2, 3): PartitionSpec("fsdp")}
    written = saved_of(state_of("float32", 1e30 if into == "float16" else FINE))
    placed = {
        name: jax.device_put(value, NamedSharding(mesh, parts.get(value.shape, PartitionSpec())))
        for name, value in written.items()
    }
    fresh = state_of(into)
    found, told = [], []
    for saved in (written, placed):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(adopt(fresh, saved, same_scaling=into != "float16"))
        told.append([str(warning.message) for warning in caught])
    assert told[0] == told[1]
    assert any("head/kernel: 6 overflow, 0 flush to zero in float16" in text for text in told[0]) == (into == "float16")
    for one, other, like in zip(*map(jax.tree.leaves, found), jax.tree.leaves(fresh), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert (other.dtype, other.sharding) == (like.dtype, like.sharding)


def test_shapes_are_filled_and_stay_where_the_checkpoint_has_nothing():
    whole = state_of("float32", FINE)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of("float32"))
    saved = saved_of(whole)
    del saved["opt_state/skipped"]
    with pytest.warns(PrecisionWarning, match="so they start afresh: opt_state/skipped"):
        state = adopt(shapes, saved)
    assert isinstance(state.opt_state.skipped, jax.ShapeDtypeStruct)
    assert (state.params["head/kernel"] == whole.params["head/kernel"]).all()
    assert int(state.step) == STEPS


# Moments


def moments_of(state):
    return optax.tree.get(state.opt_state, "mu")["head/kernel"], optax.tree.get(state.opt_state, "nu")["head/kernel"]


@pytest.mark.parametrize("into", ["float32", "float16"])
@pytest.mark.parametrize("written", ["float32", "float16"])
@pytest.mark.parametrize("half_first", [False, True])
def test_a_checkpoint_of_float32_moments_loads_with_bfloat16_moments_and_the_other_way_round(written, into, half_first):
    """float16 has master weights, whose state lies around that of the moments."""
    adam, half = optax.adam(0.1), half_moments(optax.adam(0.1))
    one, other = (half, adam) if half_first else (adam, half)
    saved = state_of(written, FINE, inner=one)
    saved = saved_of(dataclasses.replace(saved, opt_state=_with_moments(saved.opt_state, 0.123)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = adopt(state_of(into, inner=other), saved, same_scaling=written == into)
    wanted = np.float32(jnp.bfloat16(0.123))
    for moment in moments_of(state):
        assert moment.dtype == (jnp.float32 if half_first else jnp.bfloat16)
        assert (np.asarray(moment, np.float32) == wanted).all()
    if not half_first:
        assert int(optax.tree.get(state.opt_state, "draws")) == STEPS


def _with_moments(opt_state, value):
    """The state with this value in all of Adam's moments."""
    adam = optax.tree.get(opt_state, "ScaleByAdamState")
    return optax.tree.set(
        opt_state,
        mu=jax.tree.map(lambda m: jnp.full_like(m, value), adam.mu),
        nu=jax.tree.map(lambda m: jnp.full_like(m, value), adam.nu),
    )


def test_bfloat16_moments_come_back_every_bit_and_their_draws_go_on():
    half = half_moments(optax.adam(0.1))
    written = state_of("float32", FINE, inner=half)
    opt_state = optax.tree.set(_with_moments(written.opt_state, 0.123), draws=jnp.int32(17))
    written = dataclasses.replace(written, opt_state=opt_state)
    state = adopt(state_of("float32", inner=half), saved_of(written))
    for one, other in zip(jax.tree.leaves(written), jax.tree.leaves(state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert int(optax.tree.get(state.opt_state, "draws")) == 17


def large(tx, value=None):
    """A state of one parameter that is large enough for a float8 moment."""
    params = {"head/kernel": jnp.ones((32, 256))}
    tx = no_loss_scaling(tx)
    opt_state = tx.init(params)
    if value is not None:
        opt_state = optax.tree.set(opt_state, mu={"head/kernel": value})
    return TrainState(jnp.int32(STEPS if value is not None else 0), params, {}, opt_state, {})


MOMENT = jnp.asarray(np.random.default_rng(0).normal(size=(32, 256)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [optax.adam(0.1), half_moments(optax.adam(0.1))], ids=["float32", "bfloat16"])
def test_float8_moments_are_plain_ones_for_another_run_and_the_other_way_round(plain):
    eight = float8_moments(optax.adam(0.1))
    stored = grouped(MOMENT, jnp.uint32(3))
    found = optax.tree.get(adopted(large(plain), large(eight, stored)).opt_state, "mu")["head/kernel"]
    np.testing.assert_allclose(np.asarray(found, np.float32), ungrouped(stored), rtol=0.01)
    back = optax.tree.get(adopted(large(eight), large(plain, MOMENT)).opt_state, "mu")["head/kernel"]
    assert str(back.values.dtype) == "float8_e4m3fn"
    np.testing.assert_allclose(ungrouped(back), MOMENT, rtol=0.13, atol=0.02)


@pytest.mark.slow
def test_divided_moments_are_converted_on_their_devices():
    mesh = make_mesh(fsdp=2, data=1)
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    eight, plain = float8_moments(optax.adam(0.1)), half_moments(optax.adam(0.1))
    for written, into in (
        (large(eight, grouped(MOMENT, jnp.uint32(3))), large(plain)),
        (large(plain, MOMENT), large(eight)),
    ):
        on_host = saved_of(written)
        placed = {
            name: jax.device_put(x, cut if x.ndim == 2 else NamedSharding(mesh, PartitionSpec()))
            for name, x in on_host.items()
        }
        found = [adopt(into, saved, same_scaling=False).opt_state for saved in (on_host, placed)]
        for one, other in zip(*map(jax.tree.leaves, found), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_float8_moments_come_back_every_bit():
    eight = float8_moments(optax.adam(0.1))
    written = large(eight, grouped(MOMENT, jnp.uint32(3)))
    for one, other in zip(jax.tree.leaves(written), jax.tree.leaves(adopted(large(eight), written)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_float8_moment_that_a_state_lacks_belongs_where_its_parameter_is():
    mesh = make_mesh(fsdp=2, data=1)
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    kernel = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=cut)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    place = places_in(TrainState(step, {"head/kernel": kernel}, {}, {}, {}))
    assert place("opt_state/inner_state/0/mu/head/kernel/values", (4, 8)) == cut
    assert place("opt_state/inner_state/0/mu/head/kernel/scale", (4, 1)).spec == PartitionSpec()
