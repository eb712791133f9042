"""What no update moves keeps every bit: after a skipped step, after an update of zero, and between two windows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpjax.precision import (
    compensated_weights,
    dynamic_loss_scaling,
    half_moments,
    master_weights,
    moved_by,
    static_loss_scaling,
    stochastic_weights,
)


@pytest.fixture(autouse=True)
def _promotion():
    """Optax divides by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


DTYPES = ("float32", "float16", "bfloat16")
WEIGHTS = {
    "none": lambda inner: inner,
    "copies": master_weights,
    "copies by chance": functools.partial(master_weights, stochastic_rounding=True),
    "kahan": compensated_weights,
    "stochastic": stochastic_weights,
}
ACCUMULATION = {
    "no": lambda weights, rule: weights(rule),
    "outside": lambda weights, rule: optax.MultiSteps(weights(rule), 2).gradient_transformation(),
    "inside": lambda weights, rule: weights(optax.MultiSteps(rule, 2).gradient_transformation()),
}
RULE = half_moments(optax.sgd(0.1, momentum=0.9))


def special(dtype):
    """Numbers of which a sum with 0.0 may be another, and those at the ends of the range."""
    info = jnp.finfo(dtype)
    subnormal = float(info.smallest_subnormal)
    numbers = [-0.0, 0.0, 1.0, info.tiny, info.max, info.min, np.inf, -np.inf, np.nan, subnormal, -3 * subnormal]
    # Through float64: a device would flush subnormal numbers.
    return jnp.asarray(np.asarray([float(number) for number in numbers], np.float64).astype(dtype))


def bits(array):
    """Bits as they are; those of NaN may be other ones of a NaN."""
    array = np.asarray(array)
    raw = array.view(np.uint32 if array.itemsize == 4 else np.uint16)
    return np.where(np.isnan(array.astype(np.float32)), 0, raw)


def run(tx, params, gradients):
    """States and parameters from before the first step on."""

    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return moved_by(updates, params), state, optax.apply_updates(params, updates)

    found = [(params, tx.init(params), params)]
    for gradient in gradients:
        found.append(step(*found[-1][:2], gradient))
    return found


# Every pair of two of them.
TABLE = [
    (dtype, weights, list(ACCUMULATION)[(i + j) % 3])
    for (i, dtype), (j, weights) in itertools.product(enumerate(DTYPES), enumerate(WEIGHTS))
]


@pytest.mark.parametrize(("dtype", "weights", "accumulation"), TABLE)
def test_zero_updates_skipped_steps_and_open_windows_keep_every_bit(dtype, weights, accumulation):
    params = special(dtype)
    zeros = jnp.zeros_like(params)
    tx = dynamic_loss_scaling(ACCUMULATION[accumulation](WEIGHTS[weights], RULE))
    # A zero update of either sign, two skipped steps, an update of zero after them.
    gradients = [zeros, zeros, -zeros, -zeros, zeros + jnp.inf, zeros + jnp.nan, zeros, -zeros]
    normal = slice(None) if dtype == "float16" else slice(None, -2)  # a CPU flushes what optax adds -0.0 to
    for moved, _, added in run(tx, params, gradients):
        np.testing.assert_array_equal(bits(moved), bits(params))
        np.testing.assert_array_equal(bits(added)[normal], bits(params)[normal])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulation", ["outside", "inside"])
def test_the_sum_of_gradients_after_a_discarded_window_is_that_of_before(accumulation, dtype):
    """A window of negative gradients leaves no -0.0, one of inf no NaN, and one without a finite gradient nothing."""
    params = jnp.ones(3, dtype)
    tx = static_loss_scaling(ACCUMULATION[accumulation](WEIGHTS["none"], RULE), 1.0)
    finite, bad = jnp.array([-1.0, 1.0, 0.0], dtype), jnp.full(3, jnp.inf, dtype)
    largest = jnp.full(3, jnp.finfo(jnp.float32).max)
    states = run(tx, params, [finite, finite, bad, finite, finite, bad, -largest, largest, finite])
    sums = [np.asarray(optax.tree.get(state.inner_state, "acc_grads")) for _, state, _ in states]
    for index in (0, 2, 3, 4, 6, 8):
        assert sums[index].tobytes() == np.zeros(3, np.float32).tobytes()


def test_a_parameter_that_is_inf_stays_inf_and_leaves_no_nan_in_the_compensation():
    params = jnp.array([jnp.inf, 65504.0], jnp.float16)
    *_, (moved, state, _) = run(compensated_weights(RULE), params, [jnp.zeros(2, jnp.float16)])
    assert moved.tolist() == [np.inf, 65504.0]
    assert state.compensation.tolist() == [0.0, 0.0]
