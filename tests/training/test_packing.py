"""States whose small arrays are stored in a few arrays: the same numbers, by the same paths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from mpjax.config import Optimizer
from mpjax.errors import UsageError
from mpjax.precision import dynamic_loss_scaling, half_moments, master_weights, optax_promotion
from mpjax.training import (
    UNPACKED,
    Kernels,
    Layout,
    Packed,
    PackedElementwise,
    Packing,
    create_state,
    make_mesh,
    make_train_step,
    update_rule,
)


PARAMS = {
    "a/bias": jnp.array([1.0, 2.0, 3.0]),
    "a/kernel": jnp.full((2, 3), 4.0),
    "gain": jnp.array(5.0),
    "key/bias": jnp.array([[11.0, 12.0], [13.0, 14.0]]),
    "query/bias": jnp.array([[15.0, 16.0]]),
    "z/bias": jnp.array([6.0, 7.0]),
}
STATS = {"n/count": jnp.array(3), "n/mean": jnp.array([8.0, 9.0]), "n/var": jnp.array([10.0])}
VECTORS, MATRICES = "(parameters: float32 vectors)", "(parameters: float32 matrices)"
MEANS = "(statistics: float32 vectors)"


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
    assert sorted(packed.stats) == [MEANS, "n/count"]
    np.testing.assert_array_equal(packed.stats[MEANS], [8, 9, 10])
    assert packed.opt_state.inner_state[0].trace[VECTORS].shape == (6,)


def test_a_vector_alone_of_its_dtype_stays():
    params = {**PARAMS, "half": jnp.ones(4, jnp.bfloat16)}
    packed = Packing.of(params, {}).pack(params)
    assert sorted(packed) == [MATRICES, VECTORS, "a/kernel", "half"]


def test_parameters_and_statistics_that_are_all_packed_come_back_by_their_own_paths():
    """A batch norm alone has a vector of each kind."""
    params = {"n/bias": jnp.ones(3), "n/scale": jnp.full(3, 2.0)}
    stats = {"n/mean": jnp.full(3, 3.0), "n/var": jnp.full(3, 4.0)}
    packing = Packing.of(params, stats)
    state = create_state(params, stats, dynamic_loss_scaling(optax.adamw(0.1)))
    same(packing.unpack(packing.pack(state)), state)


def test_matrices_that_are_large_or_of_a_stack_stay():
    """Of a stack, optimizers take a matrix for the vectors of its blocks."""
    matrices = {"a": jnp.ones((2, 3)), "b": jnp.ones((64, 64)), "blocks/all/scale": jnp.ones((2, 3))}
    shapes = {**matrices, "table": jnp.ones((4097, 1))}
    assert set(Packing.of(shapes, {}, Kernels({"blocks": 2})).pack(shapes)) == {MATRICES, "blocks/all/scale", "table"}


def test_no_packed_array_has_more_than_65536_elements():
    """XLA would read each part of a larger one by a kernel of its own."""
    params = {str(number): jnp.full(20_000, float(number)) for number in range(7)} | {"wide": jnp.ones(65_537)}
    packing = Packing.of(params, {})
    packed = packing.pack(params)
    assert {name: array.size for name, array in packed.items()} == {
        VECTORS: 60_000,
        "(parameters: float32 vectors 2)": 60_000,
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


def rates(params):
    """Labels by path, as of an optimizer that treats arrays by their names."""
    return {path: "slow" if path.startswith("key/") else "fast" for path in params}


WHOLE_ARRAYS = {
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "factors of moments": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "rates by path": optax.partition({"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, rates),
    "muon": optax.contrib.muon(0.1),
    "window": optax.MultiSteps(optax.lamb(0.1), 2),
}


@pytest.mark.parametrize("name", WHOLE_ARRAYS)
def test_an_optimizer_of_whole_arrays_updates_packed_ones_as_by_path_bit_for_bit(name):
    tx, packing = dynamic_loss_scaling(WHOLE_ARRAYS[name]), Packing.of(PARAMS, {})
    structure: Any = None  # the optimizer needs none
    packed_tx: Any = Packed(structure, packing).optimizer(tx)
    params: Any = PARAMS
    packed: Any = packing.pack(PARAMS)
    state, packed_state = tx.init(params), packed_tx.init(packed)
    for step in range(3):
        grads = {path: jnp.sin(step + 3 * value) for path, value in params.items()}
        with jax.disable_jit(), optax_promotion():
            updates, state = tx.update(grads, state, params)
            packed_updates, packed_state = packed_tx.update(packing.pack(grads), packed_state, packed)
            params, packed = optax.apply_updates(params, updates), optax.apply_updates(packed, packed_updates)
        assert sorted(packed) == [MATRICES, VECTORS, "a/kernel"]
    same(packing.unpack(packed), params)
    same(packing.unpack(packed_state), state)


@pytest.mark.parametrize("packed_structure", [Packed, PackedElementwise])
def test_a_packed_step_is_the_step_by_path(trainer, batch, packed_structure):
    """Four steps, the second with gradients that are not finite."""
    decay = optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    made = trainer(optax.chain(decay, optax.sgd(0.1, momentum=0.9)))
    packing = Packing.of(made.state.params, made.state.stats)
    packed = packing.pack(jax.tree.map(jnp.copy, made.state))
    step = make_train_step(packed_structure(made.structure, packing), made.tx, made.loss)
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
    assert (program.count(" split["), program.count(" concatenate["), program.count(" pad[")) == (2, 2, 0)


def test_a_state_that_the_packing_of_the_step_did_not_pack_is_an_error(trainer, batch):
    made = trainer(optax.lamb(0.1))
    params, stats = made.state.params, made.state.stats
    packing, other = Packing.of(params, stats), Packing.of(params, {})
    step = make_train_step(Packed(made.structure, packing), made.tx, made.loss)
    with pytest.raises(UsageError, match="the params of the state are not packed: wanted those of packing.pack"):
        step(made.state, batch(0))
    with pytest.raises(UsageError, match="the stats of the state are not packed"):
        step(other.pack(made.state), batch(0))
    shorter = Packing.of({**params, "more": jnp.ones(3)}, {}).pack({**params, "more": jnp.ones(3)})
    with pytest.raises(UsageError, match="the params of the state are packed by another Packing"):
        packing.require_packed(shorter, packing.pack(stats))
    with pytest.raises(
        UsageError, match=r"the state has no array '.*'.* write packing.unpack\(state\) if it is packed"
    ):
        make_train_step(made.structure, made.tx, made.loss)(packing.pack(made.state), batch(0))


@pytest.mark.parametrize("packed_structure", [Packed, PackedElementwise])
def test_no_array_of_a_packed_step_is_frozen(packed_structure):
    """The optimizer would get packed arrays, and clip or normalize all biases as one."""
    structure: Any = None
    tx = dynamic_loss_scaling(optax.sgd(0.1))
    with pytest.raises(
        UsageError, match="frozen: 'a/kernel' cannot be frozen in a step of packed arrays; write the str"
    ):
        make_train_step(packed_structure(structure, Packing.of(PARAMS, {})), tx, lambda: None, frozen={"a/kernel"})


def test_no_packed_array_is_divided_over_a_mesh():
    """A block that gathers shares would have taken the whole bias for a share of a bias of twice the length."""
    structure: Any = None
    packed, tx = Packed(structure, Packing.of(PARAMS, {})), dynamic_loss_scaling(optax.sgd(0.1))
    bias, kernel = (
        Layout(make_mesh(jax.devices()[:1]), divided={name: PartitionSpec("fsdp")}) for name in ("z/bias", "a/kernel")
    )
    with pytest.raises(UsageError, match="layout: it divides 'z/bias' in a step of packed arrays; write the structure"):
        make_train_step(packed, tx, lambda: None, layout=bias)
    assert make_train_step(packed, tx, lambda: None, layout=kernel) is not None
