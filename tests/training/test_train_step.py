"""The training step: what it applies, what it skips, what it reports."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.errors import UsageError
from mpjax.precision import check_dtypes, dynamic_loss_scaling, no_loss_scaling, static_loss_scaling
from mpjax.precision.casting import autocast
from mpjax.training import Mean, cross_entropy, make_train_step, step_key


def assert_identical(one, other):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def schedule(step):
    return 0.1 / (1 + step)


@pytest.fixture(scope="module")
def overflow(trainer, batch):
    """Six steps of AdamW on a schedule, with batch norm and a moving average; the third is not finite."""
    made = trainer(optax.adamw(schedule), policy="mixed_float16", learning_rate=schedule, ema=0.9)
    batches = [batch(i, poisoned=(5,) if i == 3 else ()) for i in range(1, 7)]
    return made, *made.run(batches)


@pytest.mark.parametrize("part", ["step", "params", "stats", "ema", "opt_state.inner_state"])
def test_a_skipped_step_leaves_every_bit(overflow, part):
    """Parameters, moments, schedule count, batch statistics, moving average and `step`."""
    _, states, _ = overflow

    def get(state):
        return functools.reduce(getattr, part.split("."), state)

    assert_identical(get(states[2]), get(states[3]))
    assert len(jax.tree.leaves(get(states[2]))) > 0
    for before, after in ((1, 2), (3, 4)):
        leaves = zip(jax.tree.leaves(get(states[before])), jax.tree.leaves(get(states[after])), strict=True)
        assert all(a.tobytes() != b.tobytes() for a, b in leaves)


def test_a_skipped_step_halves_the_scale_and_restarts_the_count(overflow):
    _, states, metrics = overflow
    scaling = [state.opt_state for state in states]
    assert [float(s.scale) for s in scaling] == [32768, 32768, 32768, 16384, 16384, 16384, 16384]
    assert [int(s.good_steps) for s in scaling] == [0, 1, 2, 0, 1, 2, 3]
    assert [int(s.skipped) for s in scaling] == [0, 0, 0, 1, 1, 1, 1]
    assert [m["finite"] for m in metrics] == [1, 1, 0, 1, 1, 1]
    assert [m["skipped"] for m in metrics] == [0, 0, 1, 1, 1, 1]
    assert [m["consecutive_skips"] for m in metrics] == [0, 0, 1, 0, 0, 0]
    assert [m["loss_scale"] for m in metrics] == [32768, 32768, 32768, 16384, 16384, 16384]


def test_steps_count_what_was_applied_and_attempts_everything(overflow):
    _, states, _ = overflow
    assert [int(state.step) for state in states] == [0, 1, 2, 2, 3, 4, 5]
    assert [int(state.attempts) for state in states] == [0, 1, 2, 3, 4, 5, 6]


def test_the_logged_learning_rate_does_not_advance_on_a_skipped_step(overflow):
    _, _, metrics = overflow
    rates = [0.1, 0.1 / 2, 0.1 / 3, 0.1 / 3, 0.1 / 4, 0.1 / 5]
    assert [m["learning_rate"] for m in metrics] == pytest.approx(rates, rel=1e-6)


def test_the_logged_learning_rate_is_the_applied_one(trainer, batch):
    made = trainer(optax.sgd(schedule), learning_rate=schedule)
    states, metrics = made.run([batch(1), batch(2, poisoned=(0,)), batch(3), batch(4)])
    for (before, after), of_step in zip(itertools.pairwise(states), metrics, strict=True):
        moved = jax.tree.map(lambda a, b: (a - b).astype(np.float64), before.params, after.params)
        length = np.sqrt(sum(np.sum(m**2) for m in jax.tree.leaves(moved)))
        if of_step["finite"]:
            assert length == pytest.approx(of_step["learning_rate"] * of_step["grad_norm"], rel=1e-5)
        else:
            assert length == 0


def test_the_random_key_advances_on_every_attempt(overflow):
    """The key is a function of the seed and of the attempts."""
    _, states, _ = overflow
    keys = {jax.random.key_data(step_key(seed, state)).tobytes() for seed in (0, 1) for state in states}
    assert len(keys) == 14


def test_a_skipped_step_might_as_well_not_have_been(trainer, batch):
    """But for the scale, the run equals one without the bad batch, bit for bit."""
    with_bad, _ = trainer(optax.adamw(schedule), ema=0.5).run([batch(1), batch(2, poisoned=(0, 7)), batch(3), batch(4)])
    without, _ = trainer(optax.adamw(schedule), ema=0.5).run([batch(1), batch(3), batch(4)])
    for part in ("step", "params", "stats", "ema"):
        assert_identical(getattr(with_bad[-1], part), getattr(without[-1], part))
    assert_identical(with_bad[-1].opt_state.inner_state, without[-1].opt_state.inner_state)
    assert (float(with_bad[-1].opt_state.scale), float(without[-1].opt_state.scale)) == (16384, 32768)


def test_forty_overflows_in_a_row_apply_nothing(trainer, batch):
    made = trainer(policy="mixed_float16")
    states, metrics = made.run([batch(i, poisoned=(0,)) for i in range(40)])
    assert_identical(states[0].params, states[-1].params)
    assert [m["loss_scale"] for m in metrics[:17]] == [2.0**power for power in (*range(15, -1, -1), 0)]
    assert metrics[-1]["consecutive_skips"] == 40


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**30])
def test_the_gradient_norm_is_that_of_the_unscaled_gradient(trainer, batch, scale):
    made = trainer(optax.sgd(0.1), scaling=lambda inner: static_loss_scaling(inner, scale))
    state, data = made.state, batch(1)

    def loss(params):
        model = made.structure.assemble(params, state.stats)
        model.train()
        logits = model(data["image"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, data["label"]))

    value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
    expected = float(optax.tree.norm(grads))
    _, (metrics,) = made.run([data])
    assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-6)


def test_the_norm_of_half_precision_gradients_is_summed_in_float32(trainer, batch):
    """Eight float16 values of 300 have norm 848.5, not inf."""

    def linear(model, batch, key):
        return jnp.sum(model.first.bias[...] * jnp.float16(300)).astype(jnp.float32), {}

    _, (metrics,) = trainer(optax.sgd(0.0), policy="float16", scaling=no_loss_scaling, loss=linear).run([batch(1)])
    assert metrics["grad_norm"] == pytest.approx(300 * 8**0.5, rel=1e-6)


@pytest.mark.parametrize("scaling", [dynamic_loss_scaling, no_loss_scaling])
def test_accumulation_equals_one_large_batch(trainer, batch, scaling):
    settings = {"scaling": scaling, "net": {"norm": False}}
    whole, of_whole = trainer(**settings).run([batch(i, size=16) for i in range(3)])
    parts, of_parts = trainer(accumulate=4, **settings).run([batch(i, size=16) for i in range(3)])
    for one, other in zip(jax.tree.leaves(whole[-1].params), jax.tree.leaves(parts[-1].params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(of_whole, of_parts, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def by_weight(model, batch, key):
    """The mean cross entropy, each example counting as much as its `poison` says."""
    losses = cross_entropy(model(batch["image"]), batch["label"])
    return Mean(jnp.sum(losses * batch["poison"]), jnp.sum(batch["poison"])), {}


def run_by_weight(trainer, data, weights, **settings):
    weighted = data | {"poison": jnp.asarray(weights, jnp.float32)}
    return trainer(optax.sgd(0.1), loss=by_weight, net={"norm": False}, **settings).run([weighted])


def test_micro_batches_of_different_weights_equal_one_large_batch(trainer, batch):
    weights = [0.5, 0, 0.125, 0.125]
    whole, (of_whole,) = run_by_weight(trainer, batch(1, size=4), weights)
    parts, (of_parts,) = run_by_weight(trainer, batch(1, size=4), weights, accumulate=2)
    for one, other in zip(jax.tree.leaves(whole[-1].params), jax.tree.leaves(parts[-1].params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert of_parts["loss"] == pytest.approx(of_whole["loss"], rel=1e-5)


def test_micro_batches_without_any_weight_change_no_parameter(trainer, batch):
    states, (metrics,) = run_by_weight(trainer, batch(1, size=4), [0, 0, 0, 0], accumulate=2)
    assert (metrics["finite"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0)
    assert_identical(states[0].params, states[1].params)


@pytest.mark.parametrize("poisoned", [(0,), (6,), (15,), (0, 1, 2, 3)])
def test_an_overflow_in_one_micro_batch_discards_all_and_backs_off_once(trainer, batch, poisoned):
    states, metrics = trainer(accumulate=4, ema=0.9).run([batch(1, size=16), batch(2, size=16, poisoned=poisoned)])
    for part in ("step", "params", "stats", "ema"):
        assert_identical(getattr(states[1], part), getattr(states[2], part))
    assert_identical(states[1].opt_state.inner_state, states[2].opt_state.inner_state)
    assert [float(state.opt_state.scale) for state in states] == [32768, 32768, 16384]
    assert metrics[1]["skipped"] == 1


def test_an_overflow_poisons_nothing_later(trainer, batch):
    good, bad = batch(1, size=16), batch(2, size=16, poisoned=(6,))
    once, _ = trainer(accumulate=4).run([good])
    later, _ = trainer(accumulate=4).run([bad, good])
    assert_identical(once[-1].params, later[-1].params)


def test_a_batch_that_does_not_divide_into_micro_batches_is_an_error(trainer, batch):
    with pytest.raises(UsageError, match="a batch of 16 examples does not divide into 3 micro-batches"):
        trainer(accumulate=3).run([batch(1, size=16)])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"accumulate": 0}, "accumulate: wanted at least 1 micro-batch, got 0"),
        ({"ema": -0.1}, "ema: wanted a decay from 0 up to, not including, 1, got -0.1"),
        ({"ema": 1.0}, "ema: wanted a decay from 0 up to, not including, 1, got 1.0"),
    ],
)
def test_settings_out_of_range_are_errors(trainer, setting, says):
    with pytest.raises(UsageError, match=says):
        trainer(**setting)


def test_a_moving_average_is_in_the_state_and_in_the_step_or_in_neither(trainer, batch):
    with_average, without = trainer(ema=0.9), trainer()
    with pytest.raises(UsageError, match=r"ema=0.9, but the state keeps no moving average: .* ema=True"):
        with_average.step(without.state, batch(1))
    with pytest.raises(UsageError, match=r"ema=0.0, but the state keeps a moving average: .* ema=False"):
        without.step(with_average.state, batch(1))


def test_statistics_go_from_one_micro_batch_to_the_next(trainer, batch):
    """Two micro-batches of every other example, at momentum 0.5: mean = 0.25 * 0 + 0.25 * first + 0.5 * second."""
    data = batch(1, size=16)
    made = trainer(accumulate=2)
    kernel, bias = (np.asarray(made.state.params[f"first/{name}"]) for name in ("kernel", "bias"))
    hidden = np.asarray(data["image"]) @ kernel + bias
    states, _ = made.run([data])
    expected = 0.25 * hidden[0::2].mean(0) + 0.5 * hidden[1::2].mean(0)
    np.testing.assert_allclose(states[1].stats["norm/mean"], expected, rtol=1e-5, atol=1e-6)


def test_the_moving_average_by_hand(trainer, batch):
    states, _ = trainer(ema=0.75).run([batch(1), batch(2)])
    for name, first in states[0].params.items():
        one, two = states[1].params[name], states[2].params[name]
        np.testing.assert_allclose(
            states[2].ema[name], 0.5625 * first + 0.1875 * one + 0.25 * two, rtol=1e-5, atol=1e-7
        )


def test_one_compilation_over_an_overflow_and_a_loss_that_stays_finite(trainer, batch):
    """The gradients overflow in float16 under a scale of 2^24, the loss that is reported does not."""
    made = trainer(policy="mixed_float16", scaling=lambda inner: dynamic_loss_scaling(inner, initial_scale=2.0**24))
    _, metrics = made.run([batch(i) for i in range(20)])
    assert made.step._cache_size() == 1
    assert metrics[0]["finite"] == 0
    assert metrics[-1]["finite"] == 1
    assert all(np.isfinite(m["loss"]) and 0.5 < m["loss"] < 3 for m in metrics)
    assert all(np.asarray(m["loss"]).dtype == np.float32 for m in metrics)


def test_a_hundred_steps_without_a_word_from_the_host(trainer, batch):
    made = trainer(policy="mixed_float16", ema=0.9, learning_rate=schedule)
    batches = jax.device_put([batch(i % 7, poisoned=(0,) if i % 10 == 9 else ()) for i in range(101)])
    state, metrics = made.step(made.state, batches[0])
    with jax.transfer_guard("disallow"):
        for data in batches[1:]:
            state, metrics = made.step(state, data)
    assert int(state.attempts) == 101
    assert metrics["skipped"] == 10


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_everything_that_is_kept_is_float32(trainer, batch, policy):
    states, _ = trainer(policy=policy, ema=0.9).run([batch(1), batch(2, poisoned=(0,)), batch(3)])
    for state in states:
        check_dtypes(state, "float32", name="state")


def test_the_optimizer_sees_float32_gradients(trainer, batch):
    """Also of parameters that are stored in half precision."""
    seen = []

    def watch(updates, state, params=None):
        seen.extend(leaf.dtype.name for leaf in jax.tree.leaves(updates))
        return updates, state

    watching = optax.GradientTransformation(lambda params: optax.EmptyState(), watch)
    trainer(optax.chain(watching, optax.sgd(0.1)), policy="float16").run([batch(1)])
    assert set(seen) == {"float32"}


def test_clipping_sees_the_unscaled_gradient(trainer, batch):
    """A gradient clipped to norm 0.01 under a learning rate of 1 moves parameters by 0.01."""
    made = trainer(optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0)))
    states, (metrics,) = made.run([batch(1)])
    moved = jax.tree.map(lambda a, b: (a - b).astype(np.float64), *(state.params for state in states))
    assert np.sqrt(sum(np.sum(m**2) for m in jax.tree.leaves(moved))) == pytest.approx(0.01, rel=1e-4)
    assert metrics["grad_norm"] > 0.1


def test_the_loss_gets_the_key_of_the_step_and_its_metrics_are_reported(trainer, batch):
    def noisy(model, batch, key):
        return jnp.mean(model(batch["image"])), {"drawn": jax.random.uniform(key)}

    states, metrics = trainer(loss=noisy, seed=3).run([batch(1), batch(1)])
    expected = [float(jax.random.uniform(step_key(3, state))) for state in states[:2]]
    assert [m["drawn"] for m in metrics] == pytest.approx(expected, rel=1e-6)
    assert expected[0] != expected[1]


def test_micro_batches_get_keys_of_their_own(trainer, batch):
    def noisy(model, batch, key):
        return jnp.mean(model(batch["image"])), {"drawn": jax.random.uniform(key)}

    made = trainer(loss=noisy, accumulate=2)
    _, (metrics,) = made.run([batch(1)])
    keys = jax.random.split(step_key(0, trainer().state), 2)
    assert metrics["drawn"] == pytest.approx(float((jax.random.uniform(keys[0]) + jax.random.uniform(keys[1])) / 2))


# Autocast

CASTS = {policy: functools.partial(autocast, policy=policy) for policy in ("mixed_float16", "mixed_bfloat16")}


@pytest.mark.parametrize("part", ["step", "params", "stats", "ema", "opt_state.inner_state"])
def test_under_autocast_a_skipped_step_leaves_every_bit(autocast_overflow, part):
    states, _ = autocast_overflow

    def get(state):
        return functools.reduce(getattr, part.split("."), state)

    assert_identical(get(states[2]), get(states[3]))
    leaves = zip(jax.tree.leaves(get(states[3])), jax.tree.leaves(get(states[4])), strict=True)
    assert all(a.tobytes() != b.tobytes() for a, b in leaves)


@pytest.fixture(scope="module")
def autocast_overflow(trainer, batch):
    """Four steps under autocast, of which the third is not finite."""
    made = trainer(optax.adamw(schedule), cast=CASTS["mixed_float16"], learning_rate=schedule, ema=0.9)
    return made.run([batch(i, poisoned=(5,) if i == 3 else ()) for i in range(1, 5)])


def test_under_autocast_a_skipped_step_halves_the_scale(autocast_overflow):
    states, metrics = autocast_overflow
    assert [float(state.opt_state.scale) for state in states] == [32768, 32768, 32768, 16384, 16384]
    assert [m["finite"] for m in metrics] == [1, 1, 0, 1]
    assert [int(state.attempts) for state in states] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_under_autocast_everything_that_is_kept_is_float32(trainer, batch, policy):
    states, metrics = trainer(cast=CASTS[policy], ema=0.9).run([batch(1), batch(2, poisoned=(0,)), batch(3)])
    for state in states:
        check_dtypes(state, "float32", name="state")
    assert all(np.asarray(m["loss"]).dtype == np.float32 for m in metrics)


def test_under_autocast_gradients_overflow_in_half_the_loss_does_not_and_one_compilation_serves(trainer, batch):
    made = trainer(
        cast=CASTS["mixed_float16"], scaling=lambda inner: dynamic_loss_scaling(inner, initial_scale=2.0**24)
    )
    _, metrics = made.run([batch(i) for i in range(20)])
    assert made.step._cache_size() == 1
    assert (metrics[0]["finite"], metrics[-1]["finite"]) == (0, 1)
    assert all(np.isfinite(m["loss"]) and 0.5 < m["loss"] < 3 for m in metrics)


def test_under_autocast_a_step_is_near_that_in_float32_but_not_equal(trainer, batch):
    batches = [batch(i) for i in range(3)]
    full, cast = (trainer(optax.sgd(0.1), **how).run(batches)[0] for how in ({}, {"cast": CASTS["mixed_float16"]}))
    for name, value in full[-1].params.items():
        np.testing.assert_allclose(cast[-1].params[name], value, rtol=0.02, atol=2e-3)
    assert not np.array_equal(full[-1].params["first/kernel"], cast[-1].params["first/kernel"])
    for name, value in full[-1].stats.items():
        np.testing.assert_allclose(cast[-1].stats[name], value, rtol=1e-3, atol=1e-3)


def test_under_autocast_accumulation_equals_one_large_batch(trainer, batch):
    settings = {"cast": CASTS["mixed_float16"], "net": {"norm": False}}
    whole, _ = trainer(optax.sgd(0.1), **settings).run([batch(1, size=16)])
    parts, _ = trainer(optax.sgd(0.1), accumulate=4, **settings).run([batch(1, size=16)])
    for one, other in zip(jax.tree.leaves(whole[-1].params), jax.tree.leaves(parts[-1].params), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-4)


def test_a_metric_of_the_user_s_named_loss_does_not_replace_the_loss(trainer, batch):
    def loss(model, batch, key):
        return jnp.mean(jnp.square(model(batch["image"]))), {"loss": jnp.float32(99)}

    _, metrics = trainer(loss=loss).run([batch(1)])
    assert metrics[0]["loss"] < 99


def test_options_of_xla_hold_for_a_step_and_not_inside_of_a_callers_program(trainer, batch):
    made = trainer(compiler_options={"xla_no_such_option": True})
    with pytest.raises(Exception, match="xla_no_such_option"):
        made.step.lower(made.state, batch(1)).compile()
    with pytest.raises(Exception, match="xla_no_such_option"):
        made.step(made.state, batch(1))
    wanted, _ = trainer().run([batch(1)])
    state, _ = jax.jit(made.step)(made.state, batch(1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), wanted[1])


def test_on_a_cpu_a_step_has_no_options(trainer, batch):
    made = trainer()
    assert isinstance(made.step, type(jax.jit(lambda x: x)))


def test_a_frozen_path_that_the_state_lacks_is_an_error(trainer, batch):
    made = trainer(optax.sgd(0.1))
    step = make_train_step(made.structure, made.tx, made.loss, frozen={"nowhere/bias"})
    with pytest.raises(UsageError, match="^frozen: the state has no parameter and no statistic 'nowhere/bias'"):
        step.lower(made.state, batch(0))
