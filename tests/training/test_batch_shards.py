"""Two devices that share a batch train as one does, and agree on what to skip."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mpjax.errors import UsageError
from mpjax.precision import apply_policy, dynamic_loss_scaling, master_weights, static_loss_scaling
from mpjax.precision.casting import equations
from mpjax.training import Layout, Mean, create_state, make_eval_step, make_mesh, make_train_step, take_apart


class Net(nnx.Module):
    """Two linear layers, the first one in a list, with batch norm or without; counts its calls."""

    def __init__(self, *, norm: bool = False, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if norm else None
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        x = self.layers[0](x)
        return self.head(nnx.relu(self.norm(x) if self.norm else x))


LARGE = {"layers/0/kernel": P(None, "fsdp"), "head/kernel": P("fsdp", None)}
BOTH = pytest.mark.parametrize("axis", ["data", "fsdp"])


def layout_on(axis, **settings):
    if axis == "data":
        return Layout(make_mesh(), **settings)
    return Layout(make_mesh(data=1, fsdp=2), divided=LARGE, blocks=("layers/0",), **settings)


def weighted(model, batch, key):
    """The mean of squares over all weights."""
    squares = jnp.mean(jnp.square(model(batch["x"]).astype(jnp.float32)), axis=1)
    mean = Mean(jnp.sum(squares * batch["weight"]), jnp.sum(batch["weight"]))
    return mean, {"squares": mean, "drawn": jax.random.uniform(key), "drawn2": jax.random.uniform(key) ** 2}


def batch_of(weights=(1, 1, 0, 0, 2, 2, 2, 8)):
    x = np.random.default_rng(0).normal(size=(8, 4))
    x[4:] *= 3  # the second device's examples differ
    return {"x": jnp.asarray(x, jnp.float32), "weight": jnp.asarray(weights, jnp.float32)}


def begin(layout, *, policy="float32", tx=None, loss=weighted, norm=False, **settings):
    """The training step and its initial state."""
    model = Net(norm=norm, rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    structure, params, stats = take_apart(model)
    tx = static_loss_scaling(optax.sgd(0.5), 8.0) if tx is None else tx
    state = create_state(params, stats, tx)
    if layout is not None:
        state = jax.device_put(state, layout.state(state))
    return make_train_step(structure, tx, loss, layout=layout, **settings), state


def after(layout, batches, **settings):
    """The state and the metrics after some steps."""
    step, state = begin(layout, **settings)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, dict(jax.device_get(metrics))


def assert_near(one, other, rtol=1e-5, atol=1e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol, atol, err_msg=jax.tree_util.keystr(path)
        )


def collectives(layout, kind, **settings):
    """The dtypes of the arrays, other than scalars, in collectives of a training step."""
    step, state = begin(layout, **settings)
    found = equations(jax.make_jaxpr(step)(state, batch_of()).jaxpr)
    inputs = [v.aval for _, eqn in found if eqn.primitive.name.startswith(kind) for v in eqn.invars]
    return sorted(f"{aval.dtype}" for aval in inputs if aval.shape)


@pytest.mark.parametrize(("axis", "accumulate"), [pytest.param("fsdp", 1, marks=pytest.mark.slow), ("data", 2)])
def test_two_devices_train_on_the_mean_of_the_whole_batch(axis, accumulate):
    """The weights of their shares differ, 2 and 14: the mean of their means would be another."""
    one, metrics = after(None, [batch_of()] * 2, accumulate=accumulate)
    two, of_two = after(layout_on(axis), [batch_of()] * 2, accumulate=accumulate)
    assert_near(one.params, two.params)
    for name in ("loss", "squares", "grad_norm"):
        assert of_two[name] == pytest.approx(metrics[name], rel=1e-5)


def test_the_mean_of_the_devices_means_would_be_another():
    """Of the batch that the test before trains on."""
    whole, first, second = (
        after(None, [batch_of(weights)])[1]["loss"]
        for weights in ((1, 1, 0, 0, 2, 2, 2, 8), (1, 1, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 2, 2, 2, 8))
    )
    assert abs((first + second) / 2 - whole) > 0.01


@pytest.mark.slow
@BOTH
def test_the_parts_of_a_divided_parameter_are_on_different_devices(axis):
    state, _ = after(layout_on(axis), [batch_of()], tx=dynamic_loss_scaling(optax.adam(0.1)))
    whole = axis == "data"
    for part in (state.params, state.opt_state.inner_state[0].mu):
        shapes = {name: [s.data.shape for s in leaf.addressable_shards] for name, leaf in part.items()}
        assert shapes == {
            "head/bias": [(3,)] * 2,
            "head/kernel": [(8, 3) if whole else (4, 3)] * 2,
            "layers/0/bias": [(8,)] * 2,
            "layers/0/kernel": [(4, 8) if whole else (4, 4)] * 2,
        }


@pytest.mark.parametrize(("axis", "example"), [pytest.param("data", 0, marks=pytest.mark.slow), ("fsdp", 7)])
def test_an_overflow_on_one_device_skips_the_step_on_both(axis, example):
    bad = batch_of()
    bad["x"] = bad["x"].at[example, 0].set(jnp.inf)
    tx = dynamic_loss_scaling(optax.adam(0.1))
    step, state = begin(layout_on(axis), tx=tx, norm=True)
    before = jax.device_get((state.params, state.stats, state.opt_state.inner_state))
    state, metrics = step(state, bad)
    assert (metrics["finite"], metrics["skipped"], float(state.opt_state.scale)) == (0, 1, 2.0**14)
    changed = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() != np.asarray(b).tobytes(),
        before,
        jax.device_get((state.params, state.stats, state.opt_state.inner_state)),
    )
    assert not any(jax.tree.leaves(changed))


@pytest.mark.parametrize("reduce", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_gradients_are_added_in_reduce_dtype(policy, reduce):
    """All four in one sum."""
    layout = layout_on("data", reduce_dtype=jnp.dtype(reduce))
    tx = static_loss_scaling(master_weights(optax.sgd(0.5)), 1.0)
    assert collectives(layout, "psum", policy=policy, tx=tx) == [reduce]


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_gradients_of_divided_parameters_are_scattered_in_reduce_dtype(policy, reduce):
    half = dict.fromkeys(LARGE, jnp.dtype("bfloat16"))
    layout = layout_on("fsdp", reduce_dtype=jnp.dtype(reduce), travels=half, given=half)
    tx = static_loss_scaling(master_weights(optax.sgd(0.5)), 1.0)
    assert collectives(layout, "reduce_scatter", policy=policy, tx=tx) == [reduce] * 2
    assert collectives(layout, "all_gather", policy=policy, tx=tx) == ["bfloat16"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_in_half_precision_is_of_gradients_of_the_mean(accumulate):
    """And not of gradients times the weight of the batch, 8 * 1000 here, which overflow."""
    batch = batch_of([1000] * 8)
    layout = layout_on("data", reduce_dtype=jnp.dtype("float16"))
    _, metrics = after(layout, [batch], accumulate=accumulate, tx=static_loss_scaling(optax.sgd(0.5), 2.0**12))
    assert metrics["finite"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
@BOTH
def test_parameters_stored_in_half_precision_train_as_on_one_device(axis, told):
    own = dict.fromkeys(["layers/0/bias", "head/bias", *LARGE], jnp.dtype("bfloat16"))
    seen = []

    def loss(model, batch, key):
        seen.append({str(one.get_value().dtype) for one in (model.head.kernel, model.head.bias, model.layers[0].bias)})
        return weighted(model, batch, key)

    settings = {"policy": "bfloat16", "tx": dynamic_loss_scaling(master_weights(optax.sgd(0.5))), "loss": loss}
    one, _ = after(None, [batch_of()] * 2, **settings)
    layout = layout_on(axis, **({"travels": own, "given": own} if told else {}))
    two, _ = after(layout, [batch_of()] * 2, **settings)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(two.params)} == {"bfloat16"}
    masters = [state.opt_state.inner_state.masters for state in (one, two)]
    assert_near(*masters, rtol=0.02, atol=0.01)
    assert seen[-1] == {"bfloat16"}


@pytest.mark.slow
def test_batch_norms_see_the_whole_batch_or_their_devices_share():
    batch = batch_of([1] * 8)
    one, _ = after(None, [batch], norm=True)
    whole, _ = after(layout_on("data", batch_norm="global"), [batch], norm=True)
    own, _ = after(layout_on("data"), [batch], norm=True)
    assert_near((one.params, one.stats), (whole.params, whole.stats))
    assert np.abs(np.asarray(one.params["head/kernel"]) - own.params["head/kernel"]).max() > 1e-3
    # The running variance of a share is about its own mean.
    before = np.asarray(Net(norm=True, rngs=nnx.Rngs(0)).layers[0](batch["x"]))
    variance = np.mean([before[:4].var(axis=0), before[4:].var(axis=0)], axis=0)
    np.testing.assert_allclose(own.stats["norm/var"], 0.5 + 0.5 * variance, rtol=1e-5)
    np.testing.assert_allclose(own.stats["norm/mean"], 0.5 * before.mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("accumulate", [1, 2])
def test_statistics_are_the_same_on_both_devices_and_counters_count_as_on_one(axis, accumulate):
    state, _ = after(layout_on(axis), [batch_of()] * 3, norm=True, accumulate=accumulate)
    for leaf in state.stats.values():
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert (first.shape, first.tobytes()) == (leaf.shape, second.tobytes())
    assert (int(state.stats["calls"]), state.stats["calls"].dtype) == (3 * accumulate, jnp.int32)


@BOTH
def test_random_numbers_differ_between_devices(axis):
    _, metrics = after(layout_on(axis), [batch_of()])
    assert metrics["drawn2"] - metrics["drawn"] ** 2 > 1e-6  # their variance
    _, metrics = after(None, [batch_of()])
    assert metrics["drawn2"] == pytest.approx(metrics["drawn"] ** 2, rel=1e-6)


def test_a_scalar_loss_is_taken_for_a_mean_over_as_many_examples_on_each_device():
    def loss(model, batch, key):
        return jnp.mean(jnp.square(model(batch["x"]))), {}

    (one, metrics), (two, of_two) = (after(on, [batch_of()], loss=loss) for on in (None, layout_on("data")))
    assert_near(one.params, two.params)
    assert of_two["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("weights", [pytest.param((0,) * 8, marks=pytest.mark.slow), (0, 0, 0, 0, 1, 2, 3, 4)])
def test_a_share_without_weight_adds_nothing(weights):
    (one, metrics), (two, of_two) = (after(on, [batch_of(weights)]) for on in (None, layout_on("data")))
    assert_near(one.params, two.params)
    assert (of_two["loss"], of_two["finite"]) == (pytest.approx(metrics["loss"], rel=1e-5), 1)


@pytest.mark.parametrize(
    ("on", "accumulate"),
    [(None, 1), ("data", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, 2), ("data", 1)))],
)
def test_a_weight_that_is_nan_shows_in_the_loss_and_skips_the_step(on, accumulate):
    def loss(model, batch, key):
        mean, _ = weighted(model, batch, key)
        return Mean(mean.total, mean.weight * jnp.nan), {}

    tx = dynamic_loss_scaling(optax.sgd(0.5))
    _, metrics = after(on and layout_on(on), [batch_of()], accumulate=accumulate, tx=tx, loss=loss)
    assert (np.isnan(metrics["loss"]), metrics["finite"]) == (True, 0)


@pytest.mark.parametrize("on", [None, "data"])
def test_a_loss_of_several_quotients_is_an_error(on):
    def loss(model, batch, key):
        return Mean(jnp.sum(model(batch["x"]), axis=0), jnp.ones(3)), {}

    with pytest.raises(UsageError, match=r"loss is a Mean of shape \(3,\): wanted scalars to differentiate"):
        after(on and layout_on(on), [batch_of()], loss=loss)


@BOTH
@pytest.mark.parametrize("size", [8, 7])
def test_evaluation_sums_each_example_once(axis, size):
    model = Net(norm=True, rngs=nnx.Rngs(0))
    structure, params, stats = take_apart(model)
    batch = {"x": batch_of()["x"][:size]}

    def measure(model, batch):
        return {"squares": jnp.sum(jnp.square(model(batch["x"])), axis=1)}

    one = make_eval_step(structure, measure)(params, stats, batch)
    two = make_eval_step(structure, measure, layout=layout_on(axis))(params, stats, batch)
    assert (float(one["count"]), float(two["count"])) == (size, size)
    assert float(two["squares"]) == pytest.approx(float(one["squares"]), rel=1e-5)


def test_a_float32_average_of_half_precision_parameters_is_evaluated_in_float32():
    """Training gathers those parameters in bfloat16."""
    structure, params, stats = take_apart(Net(rngs=nnx.Rngs(0)))
    half = dict.fromkeys(LARGE, jnp.dtype("bfloat16"))
    layout = layout_on("fsdp", travels=half, given=half)

    def measure(model, batch):
        return {"squares": jnp.sum(jnp.square(model(batch["x"])), axis=1)}

    one = make_eval_step(structure, measure)(params, stats, batch_of())
    two = make_eval_step(structure, measure, layout=layout)(params, stats, batch_of())
    assert float(two["squares"]) == pytest.approx(float(one["squares"]), rel=1e-6)


def test_one_device_compiles_what_a_step_without_a_layout_does(monkeypatch):
    """But for the sums of squares, which only a device that is known to be alone adds up together."""
    monkeypatch.setattr("mpjax.training.batch_shards.added_together", contextlib.nullcontext)
    alone = Layout(make_mesh(jax.devices()[:1]))
    _, state = begin(None)
    programs = [str(jax.make_jaxpr(begin(layout)[0])(state, batch_of())) for layout in (None, alone)]
    assert programs[0] == programs[1]
