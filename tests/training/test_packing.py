"""States whose small arrays are stored in a few arrays: the same numbers, by the same paths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax.config.schema import Optimizer
from mpjax.errors import UsageError
from mpjax.precision import dynamic_loss_scaling
from mpjax.precision.float8.moments import float8_moments
from mpjax.precision.master import master_weights
from mpjax.precision.moments import half_moments
from mpjax.precision.skip_step import optax_promotion
from mpjax.training import create_state, make_train_step, packed, take_apart
from mpjax.training.optimizer import update_rule
from mpjax.training.packing import UNPACKED, Packing


PARAMS = {
    "a/bias": jnp.array([1.0, 2.0, 3.0]),
    "a/kernel": jnp.full((2, 3), 4.0),
    "gain": jnp.array(5.0),
    "key/bias": jnp.array([[11.0, 12.0], [13.0, 14.0]]),
    "query/bias": jnp.array([[15.0, 16.0]]),
    "z/bias": jnp.array([6.0, 7.0]),
}
STATS = {"n/count": jnp.array(3), "n/mean": jnp.array([8.0, 9.0]), "n/var": jnp.array([10.0])}
VECTORS, MATRICES = "(float32 vectors)", "(float32 matrices)"


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_vectors_of_a_dtype_are_one_array_and_small_matrices_another_with_two_axes():
    """By the number of axes optimizers tell what decays. A layer's kernel stays."""
    state = create_state(PARAMS, STATS, dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9)))
    packed = Packing.of(PARAMS, STATS).pack(state)
    assert sorted(packed.params) == [MATRICES, VECTORS, "a/kernel"]
    np.testing.assert_array_equal(packed.params[MATRICES], [[11, 12, 13, 14, 15, 16]])
    np.testing.assert_array_equal(packed.params[VECTORS], [1, 2, 3, 5, 6, 7])
    assert sorted(packed.stats) == [VECTORS, "n/count"]
    np.testing.assert_array_equal(packed.stats[VECTORS], [8, 9, 10])
    assert packed.opt_state.inner_state[0].trace[VECTORS].shape == (6,)


def test_a_vector_alone_of_its_dtype_stays():
    params = {**PARAMS, "half": jnp.ones(4, jnp.bfloat16)}
    packed = Packing.of(params, {}).pack(params)
    assert sorted(packed) == [MATRICES, VECTORS, "a/kernel", "half"]


def test_matrices_that_are_large_or_of_a_stack_stay():
    """Of a stack, optimizers take a matrix for the vectors of its blocks."""
    matrices = {"a": jnp.ones((2, 3)), "b": jnp.ones((64, 64)), "blocks/all/scale": jnp.ones((2, 3))}
    shapes = {**matrices, "table": jnp.ones((4097, 1))}
    assert set(Packing.of(shapes, {}, ["blocks"]).pack(shapes)) == {MATRICES, "blocks/all/scale", "table"}


def test_no_packed_array_has_more_than_65536_elements():
    """XLA would read each part of a larger one by a kernel of its own."""
    params = {str(number): jnp.full(20_000, float(number)) for number in range(7)} | {"wide": jnp.ones(65_537)}
    packing = Packing.of(params, {})
    packed = packing.pack(params)
    assert {name: array.size for name, array in packed.items()} == {
        VECTORS: 60_000,
        "(float32 vectors 2)": 60_000,
        "6": 20_000,
        "wide": 65_537,
    }
    same(packing.unpack(packed), params)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.1),
    "masters": master_weights(optax.adamw(0.1)),
    "half moments": half_moments(optax.adamw(0.1)),
    "accumulation": optax.MultiSteps(optax.adamw(0.1), 2),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_packed_state_is_the_state_of_packed_parameters_and_comes_back_bit_for_bit(name, dtype):
    tx = dynamic_loss_scaling(OPTIMIZERS[name])
    params = {path: value.astype(dtype) for path, value in PARAMS.items()}
    packing = Packing.of(params, STATS)
    state = create_state(params, STATS, tx, ema=True)
    packed = packing.pack(state)
    same(packed, create_state(packing.pack(params), packing.pack(STATS), tx, ema=True))
    same(packing.unpack(packed), state)


RULES = {
    "sgd": Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": Optimizer(name="adamw", weight_decay=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "half"),
    [
        pytest.param("adamw", False, id="float32"),
        pytest.param("sgd", True, id="bfloat16 with masters"),
    ],
)
def test_an_update_of_packed_arrays_is_the_update_by_path_bit_for_bit(name, half):
    """Operation by operation, as XLA may fuse and round otherwise: what decays, what is skipped, windows, masters."""
    dtype = jnp.bfloat16 if half else jnp.float32
    params = {path: value.astype(dtype) for path, value in PARAMS.items()}
    inner: Any = optax.MultiSteps(update_rule(RULES[name], lambda count: 0.1 / (1 + count)), 2)
    tx = dynamic_loss_scaling(master_weights(inner) if half else inner)
    packing = Packing.of(params, {})
    states: list[Any] = [tx.init(params), tx.init(packing.pack(params))]
    trees = [params, packing.pack(params)]
    for step in range(6):
        grads = {path: jnp.sin(step + 3 * value) for path, value in params.items()}
        if step == 3:
            grads["key/bias"] = grads["key/bias"].at[0, 0].set(jnp.inf)
        for number, given in enumerate((grads, packing.pack(grads))):
            with jax.disable_jit():  # MultiSteps has a condition, whose branches XLA would compile
                updates, states[number] = tx.update(given, states[number], trees[number])
            with optax_promotion():
                trees[number] = optax.apply_updates(trees[number], updates)
    assert int(states[0].skipped) == 1
    same(packing.unpack(trees[1]), trees[0])
    same(packing.unpack(states[1]), states[0])


def test_without_groups_states_pass_unchanged():
    state = create_state(PARAMS, STATS, dynamic_loss_scaling(optax.sgd(0.1)))
    assert UNPACKED.pack(state).params["a/bias"] is PARAMS["a/bias"]
    same(UNPACKED.unpack(state), state)


def test_matrices_are_not_copied():
    packing = Packing.of(PARAMS, STATS)
    packed = packing.pack(PARAMS)
    assert packed["a/kernel"] is packing.unpack(packed)["a/kernel"] is PARAMS["a/kernel"]


def test_a_packed_step_is_the_step_by_path(trainer, batch):
    """Four steps, the second with gradients that are not finite."""
    decay = optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    made = trainer(optax.chain(decay, optax.sgd(0.1, momentum=0.9)))
    structure = packed(made.structure, made.state.params, made.state.stats, made.tx)
    state = structure.packing.pack(jax.tree.map(jnp.copy, made.state))
    step = make_train_step(structure, made.tx, made.loss)
    assert len(state.params) == 3  # two kernels; two biases, a scale and the norm's bias
    for seed in range(4):
        given = batch(seed, poisoned=(5,) if seed == 1 else ())
        before = jax.device_get(state)
        state, metrics = step(state, given)
        made.state, expected = made.step(made.state, given)
        if seed == 1:
            same(jax.device_get(state).params, before.params)
            same(jax.device_get(state).stats, before.stats)
        assert int(metrics["skipped"]) == int(expected["skipped"]) == (seed > 0)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    apart = structure.packing.unpack(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), apart, made.state)


TWO = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))


def biases(params):
    return {name: name.endswith("bias") for name in params}


WHOLE = {
    "lamb": optax.lamb(0.1),
    "lamb, accumulated": optax.MultiSteps(optax.lamb(0.1), 3),
    "lamb, warmed up": optax.lamb(optax.linear_schedule(0.0, 0.1, 100)),
    "adafactor": optax.adafactor(0.1),
    "clipped by array": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "decay by name": optax.adamw(0.1, weight_decay=1e-5, mask=biases),
    "masked by paths": optax.masked(optax.sgd(0.1), dict.fromkeys(take_apart(TWO)[1], True)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_of_whole_arrays_or_of_paths_is_refused(name):
    structure, params, stats = take_apart(TWO)
    tx = dynamic_loss_scaling(WHOLE[name])
    with pytest.raises(UsageError, match="^packed: the optimizer depends on whole arrays or on their paths"):
        packed(structure, params, stats, tx)


def test_moments_that_would_be_in_float8_once_they_are_packed_are_refused():
    """Moments of fewer than 4,096 values are in float32."""
    wide = nnx.Sequential(nnx.Linear(1, 3000, rngs=nnx.Rngs(0)), nnx.LayerNorm(3000, rngs=nnx.Rngs(0)))
    structure, params, stats = take_apart(wide)
    tx = dynamic_loss_scaling(float8_moments(optax.adamw(0.1)))
    with pytest.raises(UsageError, match="^packed: .*: its state of packed arrays has other shapes or dtypes"):
        packed(structure, params, stats, tx)


def test_an_optimizer_without_an_update_in_64_steps_is_refused():
    structure, params, stats = take_apart(TWO)
    tx = dynamic_loss_scaling(optax.MultiSteps(optax.sgd(0.1), 65))
    with pytest.raises(UsageError, match="^packed: 64 updates of the optimizer are zero"):
        packed(structure, params, stats, tx)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_elementwise_optimizer_is_packed(name):
    structure, params, stats = take_apart(TWO)
    tx = dynamic_loss_scaling(optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZERS[name]))
    packing = packed(structure, params, stats, tx).packing
    assert set(packing.pack(params)) == {VECTORS, "layers/0/kernel", "layers/1/kernel"}


def test_frozen_paths_that_a_packed_state_lacks_are_refused():
    structure, params, stats = take_apart(TWO)
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    structure = packed(structure, params, stats, tx)
    state = structure.packing.pack(create_state(params, stats, tx))
    step = make_train_step(structure, tx, lambda model, batch, key: (model(batch).sum(), {}), frozen={"layers/0/bias"})
    with pytest.raises(UsageError, match="^frozen: the state has no parameter and no statistic 'layers/0/bias'"):
        step.lower(state, jnp.ones((1, 2)))


def test_the_gradient_of_a_packed_array_is_one_concatenation():
    packing = Packing.of(PARAMS, {})

    def loss(packed):
        return sum(jnp.sum(jnp.sin(value)) for value in packing.unpack(packed).values())

    program = str(jax.make_jaxpr(jax.grad(loss))(packing.pack(PARAMS)))
    assert (program.count(" split["), program.count(" concatenate["), program.count(" pad[")) == (2, 2, 0)
