"""Every bit of a training state comes back from a checkpoint, of -0.0 and of subnormal numbers too."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.loop import MASTERS, Checkpoints, adopt, places_in, read_checkpoint, to_arrays, with_moments
from mpjax.precision import (
    compensated_weights,
    dynamic_loss_scaling,
    half_moments,
    is_floating,
    master_weights,
    no_loss_scaling,
    static_loss_scaling,
    stochastic_weights,
)
from mpjax.precision.float8 import Grouped, float8_moments
from mpjax.training import Packing, TrainState, make_mesh


def as_it_is(inner):
    return inner


def in_windows(inner):
    return optax.MultiSteps(inner, 2).gradient_transformation()


MOMENTS = {"float32": as_it_is, "bfloat16": half_moments, "float8": float8_moments}
WEIGHTS = {
    "none": as_it_is,
    "copies": master_weights,
    "copies by chance": lambda inner: master_weights(inner, stochastic_rounding=True),
    "kahan": compensated_weights,
    "stochastic": stochastic_weights,
}
RULE = optax.sgd(0.1, momentum=0.9)
WINDOWS = {
    "none": lambda weights, rule: weights(rule),
    "inside": lambda weights, rule: weights(in_windows(rule)),
    "outside": lambda weights, rule: in_windows(weights(rule)),
}
SCALING = {
    "none": no_loss_scaling,
    "static": lambda inner: static_loss_scaling(inner, 8.0),
    "dynamic": dynamic_loss_scaling,
}
TABLE = [
    *itertools.product(["float32"], MOMENTS, ["none"], WINDOWS, ["dynamic"]),
    *itertools.product(["float16"], MOMENTS, WEIGHTS, WINDOWS, ["dynamic"]),
    *itertools.product(["bfloat16"], ["float32"], WEIGHTS, ["none"], SCALING),
]


def abstract_state(dtype, moments, weights, windows, scaling):
    shapes = {"a": (32,), "b": (32,)}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    tx = SCALING[scaling](WINDOWS[windows](WEIGHTS[weights], MOMENTS[moments](RULE)))
    wide = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    return TrainState(jax.ShapeDtypeStruct((), "int32"), params, {}, jax.eval_shape(tx.init, params), wide)


def of_any_bits(like, random):
    """An array of numbers of any bits, with -0.0 first and in place of NaN."""
    if not is_floating(like):
        return np.asarray(random.integers(2, size=like.shape)).astype(like.dtype)
    array = np.frombuffer(random.bytes(like.size * like.dtype.itemsize), like.dtype).copy()
    array[np.isnan(array.astype(np.float32))] = -0.0
    array[:1] = -0.0
    return array.reshape(like.shape)


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (str(leaf.dtype), np.asarray(leaf).tobytes()) for path, leaf in leaves}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The states of a table, and the arrays of the one checkpoint that they are saved in, by their names."""
    random = np.random.default_rng(0)
    on_all = jax.NamedSharding(make_mesh(), jax.P())
    states = {
        "+".join(names): jax.tree.map(lambda x: jax.device_put(of_any_bits(x, random), on_all), abstract_state(*names))
        for names in TABLE
    }
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, states, {}, score=None)
    checkpoints.close()

    def by_state(places):
        found = {}
        for name, array in read_checkpoint(folder, places=places)[1].items():
            state, _, path = name.partition("/")
            found.setdefault(state, {})[path] = array
        return found

    some = next(iter(states.values()))
    return states, {"host": by_state(None), "devices": by_state(places_in(some))}


@pytest.mark.slow
@pytest.mark.parametrize("on", ["host", "devices"])
def test_what_is_restored_has_the_bits_of_what_was_saved(kept, on):
    states, saved = kept
    assert len(states) == 69
    for name, state in states.items():
        fresh = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), state)
        assert bits(adopt(fresh, saved[on][name])) == bits(state), name


@pytest.mark.slow
def test_packing_and_unpacking_keep_every_bit(kept):
    states, _ = kept
    packing = Packing.of(next(iter(states.values())).params, {})
    for name in ("float16+bfloat16+kahan+none+dynamic", "float16+float32+copies+inside+dynamic"):
        there = packing.pack(states[name])
        assert bits(there) != bits(states[name])
        assert bits(packing.unpack(there)) == bits(states[name])


FORMS = [("float32", "none"), *itertools.product(["float16", "bfloat16"], WEIGHTS)]
ZEROS = np.array([-0.0, 0.0, -0.0, 1.5], np.float32)


SIGNS = [(True, 0.0), (False, 0.0), (True, 0.0), (False, 1.5)]


def zeros_of(dtype, weights):
    """A state whose parameters, and copies if there are any, are these numbers."""
    params = {"a": jnp.asarray(ZEROS, dtype)}
    opt_state = dynamic_loss_scaling(WEIGHTS[weights](RULE)).init(params)
    at = jax.NamedSharding(make_mesh(), jax.P())
    return jax.device_put(TrainState(jnp.int32(0), params, {}, opt_state, {}), at)


def signs(array):
    array = np.asarray(array, np.float32)[:4]
    return list(zip(np.signbit(array).tolist(), np.abs(array).tolist(), strict=True))


@pytest.fixture(scope="module")
def forms():
    return {form: zeros_of(*form) for form in FORMS}


@pytest.mark.parametrize("on", ["host", pytest.param("devices", marks=pytest.mark.slow)])
def test_minus_zero_stays_in_every_form_of_weights_that_a_run_goes_on_with(forms, on):
    """Of 121 pairs."""
    for written, into in itertools.product(FORMS, FORMS):
        saved = to_arrays(forms[written])
        saved = jax.device_get(saved) if on == "host" else saved
        state = adopt(jax.tree.map(jnp.zeros_like, forms[into]), saved)
        found = {path: signs(leaf) for path, leaf in to_arrays(state).items() if path.startswith(("params/", MASTERS))}
        assert all(each == SIGNS for each in found.values()), (written, into, found)


@pytest.mark.parametrize("on", [np.asarray, jnp.asarray], ids=["host", "devices"])
def test_minus_zero_stays_when_moments_become_float8_and_back(on):
    moment, names = on(np.tile(ZEROS, 32)), [f"mu/a/{field}" for field in Grouped._fields]
    eight = with_moments({"mu/a": moment}, dict.fromkeys(names))
    back = with_moments({name: eight[name] for name in names}, {"mu/a": None})["mu/a"]
    assert eight["mu/a/values"].dtype == jnp.float8_e4m3fn
    assert signs(eight["mu/a/values"])[:3] == SIGNS[:3]
    assert np.asarray(back).tobytes() == np.asarray(moment).tobytes()
