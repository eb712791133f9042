"""Several optimizers with one scale: each is skipped for its own gradients alone, and the scale moves once for all."""

import collections
import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.precision import (
    CountedState,
    GroupState,
    LossScaleState,
    dynamic_loss_scaling,
    loss_scale_state,
    no_loss_scaling,
    scale_loss,
    static_loss_scaling,
    where_finite,
)


INF = float("inf")
INNERS = {"a": optax.adamw(0.1, weight_decay=0.1), "b": optax.chain(optax.clip(1.0), optax.sgd(0.5, momentum=0.5))}


def start():
    return {"a": {"w": jnp.array([1.0, -2.0], jnp.float32)}, "b": {"w": jnp.array([0.5, -0.0], jnp.float32)}}


def gradients(a, b):
    """True gradients of one value in each group."""
    return {"a": {"w": jnp.full(2, a, jnp.float32)}, "b": {"w": jnp.full(2, b, jnp.float32)}}


def feeder(tx):
    """A jitted step that hands `tx` scaled gradients."""

    @jax.jit
    def step(params, state, grads):
        scaled = jax.tree.map(lambda g: g * state.scale, grads)
        updates, state = tx.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, sequence):
    """Parameters after a sequence of pairs of gradients, and the state after each."""
    step, params, state = feeder(tx), start(), tx.init(start())
    states = []
    for pair in sequence:
        params, state = step(params, state, gradients(*pair))
        states.append(state)
    return params, states


def alone(inner, values, group):
    """Parameters and optimizer state of one group after gradients of these values, without the other group."""
    tx = static_loss_scaling(inner, 1.0)
    step, params = feeder(tx), start()[group]
    state = tx.init(params)
    for value in values:
        params, state = step(params, state, {"w": jnp.full(2, value, jnp.float32)})
    return params, state.inner_state


def bits(tree):
    return [(np.asarray(leaf).tobytes(), leaf.dtype) for leaf in jax.tree.leaves(tree)]


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), actual, expected)


# A skipped step


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_an_overflow_of_one_optimizer_skips_that_one_alone_and_halves_the_scale_once(bad):
    tx = dynamic_loss_scaling(INNERS, initial_scale=1024.0)
    before, states = run(tx, [(0.25, 0.5), (0.25, 0.5)])
    after, (*_, old, new) = run(tx, [(0.25, 0.5), (0.25, 0.5), (0.25, bad)])
    assert bits(after["b"]) == bits(before["b"])
    assert bits(new.inner_state["b"].inner_state) == bits(states[-1].inner_state["b"].inner_state)
    params, inner_state = alone(INNERS["a"], [0.25] * 3, "a")
    assert_close(after["a"], params)
    assert_close(new.inner_state["a"].inner_state, inner_state)
    assert (old.scale, new.scale, new.skipped, new.consecutive_skips, new.good_steps) == (1024, 512, 1, 1, 0)
    assert [bool(new.finite), bool(new.inner_state["a"].finite), bool(new.inner_state["b"].finite)] == [
        False, True, False,
    ]  # fmt: skip


def test_where_both_overflow_nothing_moves_and_the_scale_halves_once():
    params, (state,) = run(dynamic_loss_scaling(INNERS), [(INF, INF)])
    assert bits(params) == bits(start())
    assert (state.scale, state.skipped, state.consecutive_skips) == (2.0**14, 1, 1)


def test_after_the_skip_each_goes_on_as_if_its_own_bad_step_had_not_been():
    sequence = [(0.25, 0.5), (INF, 0.5), (0.25, INF), (0.25, 0.5)]
    params, states = run(dynamic_loss_scaling(INNERS, initial_scale=1024.0), sequence)
    assert_close(params["a"], alone(INNERS["a"], [0.25] * 3, "a")[0])
    assert_close(params["b"], alone(INNERS["b"], [0.5] * 3, "b")[0])
    assert [float(state.scale) for state in states] == [1024, 512, 256, 256]
    assert [int(state.skipped) for state in states] == [0, 1, 2, 2]
    assert [int(state.consecutive_skips) for state in states] == [0, 1, 2, 0]


def test_with_a_scale_each_only_the_scale_of_the_bad_one_changes():
    txs = {name: dynamic_loss_scaling(inner) for name, inner in INNERS.items()}
    states = {name: tx.init(start()[name]) for name, tx in txs.items()}
    grads = gradients(1.0, INF)
    after = {name: tx.update(grads[name], states[name], start()[name])[1] for name, tx in txs.items()}
    assert {name: float(state.scale) for name, state in after.items()} == {"a": 2.0**15, "b": 2.0**14}


def test_the_scale_grows_after_exactly_n_steps_in_which_all_were_good():
    tx = dynamic_loss_scaling(INNERS, initial_scale=8.0, growth_interval=3)
    good, bad = (1.0, 1.0), (1.0, INF)
    _, states = run(tx, [good, good, good, good, good, bad, good, good, good])
    assert [float(state.scale) for state in states] == [8, 8, 16, 16, 16, 8, 8, 8, 16]


def test_each_optimizer_sees_unscaled_float32_gradients():
    seen = []

    def record(updates, state, params=None):
        seen.append((updates["w"].dtype.name, updates["w"].tolist()))
        return updates, state

    recorder = optax.GradientTransformation(lambda params: optax.EmptyState(), record)
    tx = dynamic_loss_scaling({"a": recorder, "b": recorder}, initial_scale=4.0)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), start())
    grads = {"a": {"w": jnp.full(2, 8, jnp.float16)}, "b": {"w": jnp.full(2, 2, jnp.float16)}}
    tx.update(grads, tx.init(params), params)
    assert seen == [("float32", [2.0, 2.0]), ("float32", [0.5, 0.5])]


# What else a step changes


def test_where_finite_asks_one_group_or_all():
    _, (state,) = run(dynamic_loss_scaling(INNERS), [(1.0, INF)])
    new, old = jnp.float32(1), jnp.float32(0)
    assert where_finite(state, new, old, group="a") == 1
    assert where_finite(state, new, old, group="b") == 0
    assert where_finite(state, new, old) == 0


def test_where_finite_finds_the_group_under_a_tolerance():
    _, (state,) = run(dynamic_loss_scaling(INNERS, tolerance=0.5), [(1.0, INF)])
    assert isinstance(state.inner_state, CountedState)
    assert [float(where_finite(state, jnp.float32(1), jnp.float32(0), group=name)) for name in "ab"] == [1, 0]


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (INNERS, "no optimizer 'critic' under this loss scale; wanted one of a, b"),
        (optax.sgd(1.0), "no optimizer 'critic' under this loss scale; it has one optimizer, without a name: omit"),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_a_group_that_is_not_there_is_an_error_that_lists_those_that_are(inner, says, tolerance):
    state = dynamic_loss_scaling(inner, tolerance=tolerance).init(start())
    with pytest.raises(UsageError, match=says):
        where_finite(state, 1, 0, group="critic")


# Names


@pytest.mark.parametrize(
    "scaling", [dynamic_loss_scaling, no_loss_scaling, lambda inner: static_loss_scaling(inner, 2)]
)
def test_missing_and_unknown_names_are_errors(scaling):
    tx = scaling(INNERS)
    state = tx.init(start())
    wanted = "several optimizers with one scale: wanted"
    with pytest.raises(UsageError, match=f"{wanted} parameters named a, b; got a$"):
        tx.init({"a": start()["a"]})
    with pytest.raises(UsageError, match=f"{wanted} parameters named a, b; got tuple"):
        tx.init((1.0, 2.0))
    with pytest.raises(UsageError, match=f"{wanted} gradients named a, b; got a, b, c"):
        tx.update({**start(), "c": {}}, state, start())
    with pytest.raises(UsageError, match=f"{wanted} parameters named a, b; got b"):
        tx.update(start(), state, {"b": start()["b"]})


def test_no_optimizer_at_all_is_an_error():
    with pytest.raises(UsageError, match="wanted an optimizer, or several by name, got none"):
        dynamic_loss_scaling({})


def test_updates_without_parameters_where_no_optimizer_needs_them():
    tx = dynamic_loss_scaling({"a": optax.sgd(1.0), "b": optax.sgd(1.0)}, initial_scale=2.0)
    updates, _ = tx.update(gradients(2.0, 4.0), tx.init(start()))
    assert (updates["a"]["w"].tolist(), updates["b"]["w"].tolist()) == ([-1, -1], [-2, -2])


@pytest.mark.parametrize("kind", [freeze, collections.OrderedDict, nnx.State])
@pytest.mark.parametrize("scaling", [dynamic_loss_scaling, no_loss_scaling])
def test_updates_come_in_the_kind_of_mapping_that_the_gradients_are(kind, scaling):
    """Flax's FrozenDict and nnx.State, and an OrderedDict whose order is not that of the names."""
    tx = scaling({"b": INNERS["b"], "a": INNERS["a"]})
    params, grads = (kind({"b": tree["b"], "a": tree["a"]}) for tree in (start(), gradients(1.0, INF)))
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    moved = optax.apply_updates(params, updates)
    assert moved["a"]["w"].tolist() != params["a"]["w"].tolist()
    if scaling is dynamic_loss_scaling:
        assert bits(moved["b"]) == bits(params["b"])


def test_an_nnx_optimizer_of_two_networks():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))

    model = Pair()
    optimizer = nnx.Optimizer(model, dynamic_loss_scaling(INNERS), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            return scale_loss(jnp.mean(model.a(x)) + jnp.mean(model.b(x * INF)), optimizer.opt_state)

        optimizer.update(model, nnx.grad(loss)(model))

    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step(model, optimizer, jnp.ones((1, 2), jnp.float32))
    after = nnx.to_pure_dict(nnx.state(model))
    np.testing.assert_array_equal(after["b"]["kernel"], before["b"]["kernel"])
    assert np.all(after["a"]["kernel"] != before["a"]["kernel"])
    assert loss_scale_state(optimizer.opt_state).scale[...] == 2.0**14


# Accumulation


def test_a_bad_micro_batch_discards_the_window_of_its_optimizer_alone():
    inner = {name: optax.MultiSteps(optax.sgd(1.0), 2) for name in "ab"}
    tx = dynamic_loss_scaling(inner, initial_scale=64.0)
    params, states = run(tx, [(1.0, 1.0), (1.0, 1.0), (0.5, INF), (1.5, 0.5), (1.0, 0.25), (1.0, 0.75)])
    assert params["a"]["w"].tolist() == [1.0 - 3.0, -2.0 - 3.0]
    assert params["b"]["w"].tolist() == [0.5 - 1.5, -1.5]
    assert [float(state.scale) for state in states] == [64, 64, 64, 32, 32, 32]
    assert [int(state.skipped) for state in states] == [0, 0, 0, 1, 1, 1]
    assert [bool(state.finite) for state in states] == [True, True, False, False, True, True]
    assert [bool(state.inner_state["a"].finite) for state in states] == [True] * 6
    assert [int(state.inner_state[name].inner_state.gradient_step) for state in states[3:4] for name in "ab"] == [2, 1]


def test_with_windows_of_two_and_three_the_scale_goes_by_each_as_it_closes():
    inner = {"a": optax.MultiSteps(optax.sgd(1.0), 2), "b": optax.MultiSteps(optax.sgd(1.0), 3)}
    tx = dynamic_loss_scaling(inner, initial_scale=64.0)
    params, states = run(tx, [(1.0, 1.0), (1.0, INF)] + [(1.0, 1.0)] * 10)
    assert [float(state.scale) for state in states] == [64.0] * 2 + [32.0] * 10  # b's first window ends with step 3
    assert [int(state.skipped) for state in states] == [0] * 2 + [1] * 10
    assert params["a"]["w"].tolist() == [1.0 - 6, -2.0 - 6]
    assert params["b"]["w"].tolist() == [0.5 - 3, -3.0]  # the first of its four windows is lost


def test_one_that_accumulates_beside_one_that_does_not():
    tx = dynamic_loss_scaling({"a": optax.sgd(1.0), "b": optax.MultiSteps(optax.sgd(1.0), 2)}, initial_scale=64.0)
    params, states = run(tx, [(1.0, INF), (1.0, 1.0), (INF, 1.0), (1.0, 1.0)])
    assert [float(state.scale) for state in states] == [64, 32, 16, 16]
    assert [int(state.good_steps) for state in states] == [1, 0, 0, 1]
    assert (params["a"]["w"].tolist(), params["b"]["w"].tolist()) == ([-2.0, -5.0], [-0.5, -1.0])


def test_windows_that_never_close_together_still_shrink_the_scale():
    def later(step):
        return jnp.where(step == 0, 1, 2)

    inner = {"a": optax.MultiSteps(optax.sgd(1.0), 2), "b": optax.MultiSteps(optax.sgd(1.0), later)}
    _, states = run(dynamic_loss_scaling(inner, initial_scale=64.0), [(INF, 1.0)] * 6)
    assert [float(state.scale) for state in states] == [64.0, 32.0, 32.0, 16.0, 16.0, 8.0]


# Static and none


def test_a_static_scale_skips_one_group_and_stays():
    params, (state,) = run(static_loss_scaling(INNERS, 128.0), [(0.25, INF)])
    assert bits(params["b"]) == bits(start()["b"])
    assert_close(params["a"], alone(INNERS["a"], [0.25], "a")[0])
    assert (state.scale, state.skipped, bool(state.finite)) == (128, 1, False)
    assert not where_finite(state, jnp.asarray(True), jnp.asarray(False), group="b")


def test_without_scaling_nothing_is_checked_and_nothing_skipped():
    sgd = {name: optax.sgd(1.0) for name in "ab"}
    params, (state,) = run(no_loss_scaling(sgd), [(0.25, INF)])
    assert (params["a"]["w"].tolist(), params["b"]["w"].tolist()) == ([0.75, -2.25], [-INF, -INF])
    assert (state.scale, state.skipped, bool(state.finite)) == (1, 0, True)
    assert where_finite(state, jnp.asarray(True), jnp.asarray(False), group="b")
    assert jax.tree.structure(state) == jax.tree.structure(dynamic_loss_scaling(sgd).init(start()))


# The state


def test_one_compilation_and_a_donated_state():
    tx = dynamic_loss_scaling(INNERS, growth_interval=2, tolerance=0.25)
    step, state = jax.jit(tx.update, donate_argnums=1), tx.init(start())
    for pair in [(1.0, 1.0), (1.0, 1.0), (INF, 1.0), (1.0, INF), (INF, INF), (1.0, 1.0)]:
        donated = state
        _, state = step(gradients(*pair), state, start())
        assert donated.scale.is_deleted()
    assert step._cache_size() == 1
    assert (state.skipped, state.consecutive_skips) == (3, 0)


def unusual_state():
    """Another value in every leaf than a fresh state has."""
    fresh = dynamic_loss_scaling(INNERS, tolerance=0.5).init(start())

    def other(leaf):
        return ~leaf if leaf.dtype == jnp.bool_ else leaf + jnp.asarray(3, leaf.dtype)

    return jax.tree.map(other, fresh), fresh


def assert_same(restored, state):
    assert isinstance(restored, LossScaleState)
    assert isinstance(restored.inner_state, CountedState)
    assert isinstance(restored.inner_state.inner_state["b"], GroupState)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_the_state_of_a_group_survives_tree_map_jit_and_flax_serialization():
    state, fresh = unusual_state()
    assert_same(jax.tree.map(lambda leaf: leaf, state), state)
    assert_same(jax.jit(lambda state: state)(state), state)
    assert_same(flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)), state)


def test_the_state_of_a_group_survives_orbax(tmp_path):
    state, fresh = unusual_state()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda state: state, fresh))
    assert_same(restored, state)


# Several devices, several members


def step_on_a_shard(tx, params, state, grads):
    """One step of parameters that are cut across the axis `data`."""
    updates, state = tx.update(jax.tree.map(lambda g: g * state.scale, grads), state, params)
    return optax.apply_updates(params, updates), state


FULL = {name: jnp.array([1.0, -2.0, 0.5, 4.0], jnp.float32) for name in "ab"}
SEQUENCE = [(1.0, 1.0), (1.0, INF), (-0.5, 1.0), (INF, INF), (1.0, 0.25)]


def sharded_gradients(a, b):
    """Gradients [4] of which only the last, on the second of two devices, is bad."""
    return {name: jnp.array([1.0, -1.0, 0.5, value], jnp.float32) for name, value in (("a", a), ("b", b))}


def whole(inner):
    """Parameters and state after the sequence on one device."""
    tx = dynamic_loss_scaling(inner, initial_scale=256.0, growth_interval=2)
    params, state = FULL, tx.init(FULL)
    for pair in SEQUENCE:
        params, state = jax.jit(functools.partial(step_on_a_shard, tx))(params, state, sharded_gradients(*pair))
    return params, state


SHARDED = {
    "one": optax.adam(0.1),
    "group": {"a": optax.adam(0.1), "b": optax.sgd(0.5, momentum=0.9)},
}


@pytest.mark.parametrize("inner", [SHARDED["group"]], ids=["group"])
def test_under_shard_map_two_devices_with_half_of_the_parameters_each_take_the_steps_of_one(inner):
    tx = dynamic_loss_scaling(inner, initial_scale=256.0, growth_interval=2, axis_name="data")
    params, state = FULL, tx.init(FULL)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, state_specs = P("data"), jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), state)
    step = jax.jit(
        jax.shard_map(
            functools.partial(step_on_a_shard, tx),
            mesh=mesh, in_specs=(cut, state_specs, cut), out_specs=(cut, state_specs),
        )
    )  # fmt: skip
    for pair in SEQUENCE:
        params, state = step(params, state, sharded_gradients(*pair))
    expected_params, expected = whole(inner)
    assert_close(params, expected_params)
    assert_close(state, expected)
    assert (state.skipped, state.scale) == (2, 64.0)


@pytest.mark.parametrize("inner", [SHARDED["one"]], ids=["one"])
def test_under_pmap_two_devices_with_half_of_the_parameters_each_take_the_steps_of_one(inner):
    tx = dynamic_loss_scaling(inner, initial_scale=256.0, growth_interval=2, axis_name="data")

    def halves(tree):
        return jax.tree.map(lambda leaf: leaf.reshape(2, 2) if leaf.ndim else leaf, tree)

    params, state = halves(FULL), halves(tx.init(FULL))
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)
    step = jax.pmap(functools.partial(step_on_a_shard, tx), axis_name="data", in_axes=(0, axes, 0), out_axes=(0, axes))
    for pair in SEQUENCE:
        params, state = step(params, state, halves(sharded_gradients(*pair)))
    expected_params, expected = whole(inner)
    assert_close(params, halves(expected_params))
    assert_close(state, halves(expected))


@pytest.mark.parametrize("bad_example", [0, 7])
def test_two_devices_with_half_of_the_batch_each_take_the_steps_of_one_with_all_of_it(bad_example):
    x = jnp.sin(jnp.arange(24.0, dtype=jnp.float32)).reshape(8, 3)
    batches = [x, x.at[bad_example].set(INF), -x, x + 0.5]
    params = {name: {"w": jnp.array([0.5, -1.0, 2.0], jnp.float32)} for name in "ab"}

    def make(axis_name, examples):
        tx = dynamic_loss_scaling(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, growth_interval=2, axis_name=axis_name
        )

        def step(params, state, x):
            def loss(params):  # a part of the mean over the whole batch; an example that is bad, is so for `b` alone
                clean = jnp.where(jnp.isfinite(x), x, 0.0)
                return (jnp.sum((clean @ params["a"]["w"]) ** 2) + jnp.sum((x @ params["b"]["w"]) ** 2)) / examples

            grads = jax.grad(lambda params: scale_loss(loss(params), state))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step, tx.init(params)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    many, many_state = make("data", 8)
    many = jax.jit(jax.shard_map(many, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    one, one_state = make(None, 8)
    ours = theirs = params
    for batch in batches:
        ours, many_state = many(ours, many_state, batch)
        theirs, one_state = jax.jit(one)(theirs, one_state, batch)
    assert_close(ours, theirs)
    assert_close(many_state, one_state)
    assert (many_state.skipped, many_state.scale) == (1, 2.0**15)
    assert [int(many_state.inner_state["a"].inner_state[0].count), bool(many_state.finite)] == [4, True]


def test_members_of_an_ensemble_have_a_scale_each_and_skip_alone():
    tx = dynamic_loss_scaling(optax.adam(0.1), initial_scale=64.0, growth_interval=2)
    params = {"w": jnp.array([[1.0], [2.0], [3.0]], jnp.float32)}
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(functools.partial(step_on_a_shard, tx)))
    for values in [(1.0, 1.0, 1.0), (1.0, INF, 1.0)]:
        before, (params, state) = params, step(params, state, {"w": jnp.array(values, jnp.float32)[:, None]})
    assert state.scale.tolist() == [128, 32, 128]
    assert (state.skipped.tolist(), state.finite.tolist()) == ([0, 1, 0], [True, False, True])
    assert state.inner_state[0].count.tolist() == [2, 1, 2]
    assert (params["w"] == before["w"]).tolist() == [[False], [True], [False]]
