"""What is frozen keeps every bit, and takes no part in norms, moments and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.errors import UsageError
from mpjax.loop import adopt, to_arrays
from mpjax.models import in_series
from mpjax.precision import apply_policy, dynamic_loss_scaling, master_weights
from mpjax.precision.casting import autocast
from mpjax.training import (
    create_state,
    cross_entropy,
    freeze_statistics,
    frozen_paths,
    make_eval_step,
    make_train_step,
    take_apart,
    trained_only,
)


class Net(nnx.Module):
    """Two linear layers, with batch norm between them or without."""

    def __init__(self, *, norm: bool, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if norm else None
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.head(nnx.relu(self.norm(x) if self.norm else x))


def weighted_loss(model, batch, key):
    """Cross entropy times each example's `poison`, which is 1 in a good batch."""
    logits = model(batch["image"])
    return jnp.mean(cross_entropy(logits, batch["label"]) * batch["poison"]), {"largest": jnp.max(logits)}


def made(*patterns, policy="mixed_float16", cast=None, inner=None, norm=True, **settings):
    """A training step and its first state."""
    model = Net(norm=norm, rngs=nnx.Rngs(0))
    apply_policy(model, policy)
    frozen = frozen_paths(model, patterns)
    freeze_statistics(model, frozen)
    structure, params, stats = take_apart(model)
    tx = trained_only(dynamic_loss_scaling(inner or optax.adamw(0.1)), frozen)
    more = {"cast": functools.partial(autocast, policy=cast)} if cast else {}
    step = make_train_step(structure, tx, weighted_loss, frozen=frozen, **more, **settings)
    return step, create_state(params, stats, tx, ema="ema" in settings, frozen=frozen), structure


def bits(arrays, *names):
    return {name: np.asarray(arrays[name]).tobytes() for name in names or arrays}


FROZEN = ("first/bias", "first/kernel", "norm/bias", "norm/scale")
STATISTICS = ("norm/mean", "norm/var")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "cast"), [("mixed_float16", None), ("float32", "mixed_float16")])
def test_frozen_arrays_keep_every_bit_and_the_others_train(batch, policy, cast):
    """Four steps of AdamW with weight decay and a moving average; the third overflows, the fourth is resumed."""
    step, state, _ = made("first/*", "norm", policy=policy, cast=cast, ema=0.9)
    before = jax.device_get(state)
    for number in (1, 2, 3):
        state, metrics = step(state, batch(number, poisoned=(5,) if number == 3 else ()))
    assert float(metrics["finite"]) == 0
    saved = {path: np.asarray(array) for path, array in to_arrays(state).items()}
    _, fresh, _ = made("first/*", "norm", policy=policy, cast=cast, ema=0.9)
    resumed = adopt(fresh, saved)
    for name in ("params", "stats", "ema", "opt_state"):
        assert [*map(_bits, jax.tree.leaves(getattr(resumed, name)))] == [
            *map(_bits, jax.tree.leaves(getattr(state, name)))
        ]
    state, metrics = step(resumed, batch(4))
    assert float(metrics["finite"]) == 1
    assert bits(state.params, *FROZEN) == bits(before.params, *FROZEN)
    assert sorted(state.ema) == ["head/bias", "head/kernel"]  # no average of what stays as it is
    assert bits(state.averaged, *FROZEN) == bits(before.params, *FROZEN)
    assert bits(state.stats, *STATISTICS) == bits(before.stats, *STATISTICS)
    for name in ("head/bias", "head/kernel"):
        assert bits(state.params, name) != bits(before.params, name)
        assert bits(state.ema, name) != bits(before.ema, name)
    assert [path for path in saved if "mu/" in path] == [
        "opt_state/inner_state/0/mu/head/bias",
        "opt_state/inner_state/0/mu/head/kernel",
    ]


def _bits(leaf):
    return np.asarray(leaf).tobytes()


def test_without_frozen_statistics_a_batch_norm_keeps_counting(batch):
    step, state, _ = made("norm/scale", "norm/bias")
    before = bits(jax.device_get(state.stats))
    state, _ = step(state, batch(1))
    assert all(bits(state.stats)[name] != before[name] for name in STATISTICS)


def test_a_frozen_batch_norm_normalizes_as_in_evaluation(batch):
    """The largest logit of the step is that of evaluation, not of batch statistics."""
    step, state, structure = made("norm", policy="float32")
    measure = make_eval_step(structure, lambda model, batch: {"largest": jnp.max(model(batch["image"]), axis=1)})
    params, stats = jax.device_get((state.params, state.stats))
    each = [{name: x[i : i + 1] for name, x in batch(1).items()} for i in range(8)]
    largest = max(float(measure(params, stats, one)["largest"]) for one in each)
    _, metrics = step(state, batch(1))
    assert float(metrics["largest"]) == pytest.approx(largest, rel=1e-5)


def test_no_gradient_of_what_is_frozen_is_computed(batch):
    """Two layers have two products forward and three backward; with the first frozen, one is left of these."""

    def products(*patterns):
        step, state, _ = made(*patterns, policy="float32", norm=False)
        return str(jax.make_jaxpr(step)(state, batch(1))).count("dot_general[")

    assert (products(), products("first")) == (5, 3)


def test_the_norm_of_gradients_is_of_what_is_trained(batch):
    """The head has the gradients that it has without freezing, and clipping sees them alone."""
    sgd = optax.sgd(1.0)
    whole, state, _ = made(policy="float32", norm=False, inner=sgd)
    before = jax.device_get(state.params)
    after = jax.device_get(whole(state, batch(1))[0].params)
    grads = {name: before[name] - after[name] for name in ("head/bias", "head/kernel")}
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
    clipped, state, _ = made(
        "first", policy="float32", norm=False, inner=optax.chain(optax.clip_by_global_norm(norm / 2), sgd)
    )
    state, metrics = clipped(state, batch(1))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    for name, g in grads.items():
        np.testing.assert_allclose(before[name] - np.asarray(state.params[name]), g / 2, rtol=1e-3, atol=1e-6)


def test_master_weights_and_updates_are_of_what_is_trained():
    tx = trained_only(master_weights(optax.sgd(1.0)), {"a"})
    params = {"a": jnp.float16(1), "b": jnp.float16(1)}
    state = tx.init(params)
    assert list(state.masters) == ["b"]
    updates, _ = tx.update(params, state, params)
    assert (float(updates["b"]), str(updates["a"])) == (-1, "-0.0")


def test_patterns_that_freeze_nothing_or_everything_are_errors():
    model = Net(norm=True, rngs=nnx.Rngs(0))
    assert frozen_paths(model, ()) == frozenset()
    with pytest.raises(UsageError, match=r"--training.freeze 'frist' matches nothing; nearest: first"):
        frozen_paths(model, ["frist"])
    with pytest.raises(UsageError, match=r"--training.freeze \*: all parameters are frozen"):
        frozen_paths(model, ["*"])


def test_a_stack_is_frozen_as_a_whole():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            self.blocks = in_series(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 3, rngs=rngs, scan=True)
            self.head = nnx.Linear(2, 2, rngs=rngs)

    model = Stacked(nnx.Rngs(0))
    assert frozen_paths(model, ["blocks/*"]) == {"blocks/all/bias", "blocks/all/kernel"}
    assert frozen_paths(model, ["blocks/?/bias"]) == {"blocks/all/bias"}
    with pytest.raises(UsageError, match=r"'blocks/1' is for some of the 3 blocks that blocks/all/bias holds"):
        frozen_paths(model, ["blocks/1"])
