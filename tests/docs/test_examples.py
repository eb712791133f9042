"""The examples of docs/examples: each trains, in float32 where it must be, compiles once, and survives a bad batch."""

import functools
import importlib.util
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax


EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"


@functools.cache
def example(name):
    """The module of an example; one per session, so that what it compiles is compiled once."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linen():
    """The state, how to step it, and what a step may change: parameters, and all that is not the loss scale."""
    module = example("linen_train_state")
    state = module.create_state(jax.random.key(0))

    def step(batch):
        nonlocal state
        state, loss = module.train_step(state, *batch)
        return loss

    def parts():
        return state.params, state.opt_state, (state.batch_stats, state.step)

    return module, step, parts


def nnx_module():
    module = example("nnx_optimizer")
    model, optimizer = module.create(seed=0)

    def step(batch):
        return module.train_step(model, optimizer, *batch)

    def parts():
        params, statistics = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        return nnx.as_pure((params, optimizer.opt_state, (statistics, optimizer.step)))

    return module, step, parts


def equinox():
    module = example("equinox_loop")
    model, statistics, opt_state = module.create(jax.random.key(0))

    def step(batch):
        nonlocal model, statistics, opt_state
        model, statistics, opt_state, loss = module.train_step(model, statistics, opt_state, *batch)
        return loss

    def parts():
        return eqx.filter(model, eqx.is_inexact_array), opt_state, statistics

    return module, step, parts


def bare(param_dtype="float32"):
    module = example("bare_loop")
    state = module.create_state(jax.random.key(0), param_dtype)

    def step(batch):
        nonlocal state
        state, loss = module.train_step(state, *batch)
        return loss

    def parts():
        return state.params, state.opt_state, (state.average, state.step)

    return module, step, parts


LOOPS = [nnx_module, *(pytest.param(loop, marks=pytest.mark.slow) for loop in (linen, equinox, bare))]


def bits(tree):
    return [(np.asarray(leaf).tobytes(), leaf.dtype) for leaf in jax.tree.leaves(tree)]


def test_every_example_is_tested():
    tested = {"linen_train_state", "nnx_optimizer", "equinox_loop", "bare_loop", "gradient_penalty"}
    # test_unet_dice.py, test_field_examples.py
    elsewhere = {"unet_dice", "own_dataset", "fine_tune", "own_model"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | elsewhere


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("linen_train_state", (1.2, 1.6), (0.0, 0.7)),
        ("nnx_optimizer", (1.2, 1.6), (0.0, 0.5)),
        ("equinox_loop", (1.2, 1.6), (0.0, 0.5)),
        ("bare_loop", (0.8, 1.4), (0.0, 0.25)),
        ("gradient_penalty", (5.0, 10.0), (-3.3, -3.1)),
    ],
)
def test_the_loss_falls(name, first, last):
    began, ended = example(name).main()
    assert first[0] < began < first[1]
    assert last[0] < ended < last[1]


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["float16", "bfloat16"])
def test_the_bare_loop_also_trains_parameters_stored_in_half_precision(param_dtype):
    _, ended = example("bare_loop").main(param_dtype=param_dtype)
    assert ended < 0.25


@pytest.mark.parametrize("loop", LOOPS)
def test_all_that_is_kept_is_float32_and_finite_and_the_loss_is_float32(loop):
    module, step, parts = loop()
    for seed in range(3):
        loss = step(module.make_batch(jax.random.key(seed)))
    assert (loss.dtype, bool(jnp.isfinite(loss))) == (jnp.float32, True)
    mpjax.check_dtypes(parts(), "float32")
    floating = [leaf for leaf in jax.tree.leaves(parts()) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floating) > 10
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in floating)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_with_an_inf_changes_nothing_but_the_loss_scale(loop):
    module, step, parts = loop()
    batches = [module.make_batch(jax.random.key(seed)) for seed in range(4)]
    batches[2] = (batches[2][0].at[0, 0].set(jnp.inf), batches[2][1])
    step(batches[0])
    step(batches[1])

    params, opt_state, others = parts()
    inner = mpjax.loss_scale_state(opt_state).inner_state
    before = bits((params, inner, others))
    step(batches[2])
    params, opt_state, others = parts()
    scaling = mpjax.loss_scale_state(opt_state)
    assert bits((params, scaling.inner_state, others)) == before
    assert [float(scaling.scale), int(scaling.skipped), int(scaling.good_steps)] == [2.0**14, 1, 0]

    step(batches[3])
    params, opt_state, others = parts()
    scaling = mpjax.loss_scale_state(opt_state)
    after = bits((params, scaling.inner_state, others))
    changed = [b != a for b, a in zip(before, after, strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    assert int(scaling.skipped) == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_the_step_compiles_once(loop):
    module, step, _ = loop()
    batches = [module.make_batch(jax.random.key(seed)) for seed in range(3)]
    step(batches[0])
    compiled = []

    def listener(event, duration, **kwargs):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        step(batches[1])
        step(batches[2])
        assert compiled == []
        jax.jit(lambda x: x + len(compiled)).lower(1.0).compile()  # so that the count counts
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def program_of(loop):
    """The training step as text; of NNX, whose step changes its arguments, the forward pass."""
    if loop is not nnx_module:
        module, step, _ = loop()
        return str(jax.make_jaxpr(step)(module.make_batch(jax.random.key(0))))
    module = example("nnx_optimizer")
    graphdef, state = nnx.split(module.create(seed=0)[0])
    images, _ = module.make_batch(jax.random.key(0))
    return str(jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x, train=True))(state, images))


@pytest.mark.parametrize("loop", LOOPS)
def test_every_product_runs_in_float16(loop):
    lines = program_of(loop).splitlines()
    products = [line for line in lines if "= dot_general[" in line or "= conv_general_dilated[" in line]
    assert len(products) >= 2
    # Only the head of a model with a policy leaves in float32.
    assert sum(":f16[" not in line for line in products) == (loop is nnx_module)


class TestGradientPenalty:
    """Double backward: the inner gradient is scaled too, and divided by the scale in float32."""

    def train(self, tx, policy, steps=10):
        module = example("gradient_penalty")
        params = module.create_params(jax.random.key(0))
        opt_state = tx.init(params)
        train_step = module.make_train_step(tx, policy)
        for seed in range(steps):
            params, opt_state, _ = train_step(params, opt_state, *module.make_batch(jax.random.key(seed)))
        assert int(mpjax.loss_scale_state(opt_state).skipped) == 0
        return params

    @pytest.mark.slow
    def test_parameters_are_the_same_with_scaling_on_and_off(self):
        off = self.train(mpjax.no_loss_scaling(optax.adam(3e-3)), "float32")
        on = self.train(mpjax.static_loss_scaling(optax.adam(3e-3), 2.0**10), "float32")
        for a, b in zip(jax.tree.leaves(off), jax.tree.leaves(on), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)

    @pytest.mark.slow
    def test_float16_with_scaling_follows_float32(self):
        exact = self.train(mpjax.no_loss_scaling(optax.sgd(1e-3)), "float32")
        half = self.train(mpjax.static_loss_scaling(optax.sgd(1e-3), 2.0**10), "mixed_float16")
        start = example("gradient_penalty").create_params(jax.random.key(0))
        moved = optax.tree.norm(jax.tree.map(jnp.subtract, exact, start))
        apart = optax.tree.norm(jax.tree.map(jnp.subtract, exact, half))
        assert moved > 0.05
        assert apart < 0.01 * moved

    @pytest.mark.slow
    def test_a_small_inner_gradient_underflows_unless_it_is_scaled(self):
        module = example("gradient_penalty")
        params = jax.tree.map(lambda p: 1e-3 * p, module.create_params(jax.random.key(0)))
        x = jnp.ones((1, 2))  # gradients near 1e-10; the smallest float16 is 6e-8
        exact = module.input_gradient(module.critic, params, x, jnp.float32(1))
        assert 1e-11 < jnp.abs(exact).max() < 1e-8
        score = mpjax.autocast(module.critic, "mixed_float16")
        assert not module.input_gradient(score, params, x, jnp.float32(1)).any()
        scaled = module.input_gradient(score, params, x, jnp.float32(2.0**15))
        np.testing.assert_allclose(scaled, exact, rtol=0.05)
