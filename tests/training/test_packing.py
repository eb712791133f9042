"""States whose vectors are stored in one array: the same numbers, by the same paths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.precision import dynamic_loss_scaling
from mpjax.precision.master import master_weights
from mpjax.precision.moments import half_moments
from mpjax.training import create_state, make_train_step
from mpjax.training.packing import UNPACKED, Packed, Packing


PARAMS = {
    "a/bias": jnp.array([1.0, 2.0, 3.0]),
    "a/kernel": jnp.full((2, 3), 4.0),
    "gain": jnp.array(5.0),
    "z/bias": jnp.array([6.0, 7.0]),
}
STATS = {"n/count": jnp.array(3), "n/mean": jnp.array([8.0, 9.0]), "n/var": jnp.array([10.0])}
VECTORS = "(float32 vectors)"


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_vectors_of_a_dtype_are_one_array_and_all_else_stays():
    state = create_state(PARAMS, STATS, dynamic_loss_scaling(optax.sgd(0.1, momentum=0.9)))
    packed = Packing.of(PARAMS, STATS).pack(state)
    assert sorted(packed.params) == [VECTORS, "a/kernel"]
    np.testing.assert_array_equal(packed.params[VECTORS], [1, 2, 3, 5, 6, 7])
    assert sorted(packed.stats) == [VECTORS, "n/count"]
    np.testing.assert_array_equal(packed.stats[VECTORS], [8, 9, 10])
    assert packed.opt_state.inner_state[0].trace[VECTORS].shape == (6,)


def test_a_vector_alone_of_its_dtype_stays():
    params = {**PARAMS, "half": jnp.ones(4, jnp.bfloat16)}
    packed = Packing.of(params, {}).pack(params)
    assert sorted(packed) == [VECTORS, "a/kernel", "half"]


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
    packing = Packing.of(made.state.params, made.state.stats)
    packed = packing.pack(jax.tree.map(jnp.copy, made.state))
    step = make_train_step(Packed(made.structure, packing), made.tx, made.loss)
    assert len(packed.params) == 3  # two kernels; two biases, a scale and the norm's bias
    for seed in range(4):
        given = batch(seed, poisoned=(5,) if seed == 1 else ())
        before = jax.device_get(packed)
        packed, metrics = step(packed, given)
        made.state, expected = made.step(made.state, given)
        if seed == 1:
            same(jax.device_get(packed).params, before.params)
            same(jax.device_get(packed).stats, before.stats)
        assert int(metrics["skipped"]) == int(expected["skipped"]) == (seed > 0)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    found = packing.unpack(packed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, made.state)


def test_the_gradient_of_a_packed_array_is_one_concatenation():
    packing = Packing.of(PARAMS, {})

    def loss(packed):
        return sum(jnp.sum(jnp.sin(value)) for value in packing.unpack(packed).values())

    program = str(jax.make_jaxpr(jax.grad(loss))(packing.pack(PARAMS)))
    assert (program.count(" split["), program.count(" concatenate["), program.count(" pad[")) == (1, 1, 0)
