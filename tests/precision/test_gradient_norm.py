"""The sum of squares that checks, measures and clips gradients in one pass."""

import contextlib
import functools
import re

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax.precision import added_together, all_finite, clip_by_global_norm, global_norm, square_sum, unscaled


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@given(x=arrays.arrays(np.float32, 7, elements=st.floats(width=32)))
@settings(max_examples=60)
def test_is_finite_exactly_where_every_value_is(dtype, x):
    """Values whose squares overflow included."""
    given_values = {"w": jnp.asarray(x).astype(dtype), "b": jnp.float32(1e30)}
    assert bool(all_finite(given_values)) == bool(jnp.isfinite(given_values["w"]).all())


def test_finite_values_too_large_to_square_are_finite_and_infinitely_long():
    huge = jnp.array([3e38, -3e38])
    assert float(square_sum(huge)) == float("inf")
    assert bool(all_finite(huge))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1j * np.inf, complex(0, np.nan)])
def test_one_bad_value_beside_an_overflow_is_found(bad):
    dtype = jnp.complex64 if isinstance(bad, complex) else jnp.float32
    assert not bool(all_finite([jnp.full(3, 3e38), jnp.array([1, bad], dtype)]))


def test_sums_are_float32_for_half_and_complex_values_and_skip_integers():
    leaves = [jnp.full(10, 300, jnp.float16), jnp.array([3 + 4j], jnp.complex64), jnp.arange(5)]
    found = square_sum(leaves)
    assert found.dtype == jnp.float32
    assert float(found) == 900_025
    assert float(global_norm([])) == 0


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_passes_where_nan_is_an_error(bad):
    tx = mpjax.dynamic_loss_scaling(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)))
    params = jnp.ones(3)

    @jax.jit
    def step(gradients, state):
        updates, new = tx.update(gradients, state, params)
        return updates, new, global_norm(unscaled(gradients, state.scale))

    gradients = jnp.array([1.0, bad, 2.0])
    with jax.debug_nans(True):
        updates, new, norm = step(gradients, tx.init(params))
    assert (int(new.skipped), float(norm)) == (1, float("inf"))
    np.testing.assert_array_equal(updates, np.zeros(3))


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_clipping_is_optax_s(size):
    gradients = {"w": size * jnp.array([3.0, 4.0]), "b": jnp.array(size)}
    expected, _ = optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    actual, _ = clip_by_global_norm(1.0).update(gradients, optax.EmptyState())
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_clipping_float16_sums_squares_in_float32():
    actual, _ = clip_by_global_norm(1.0).update(jnp.full(10, 300, jnp.float16), optax.EmptyState())
    np.testing.assert_allclose(actual, np.full(10, 0.1**0.5), rtol=1e-3)


@pytest.mark.parametrize("beside", [None, "float32", "float64"])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e5])
@pytest.mark.parametrize("size", [1.0, 60_000.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_clipping_rounds_once(dtype, size, max_norm, beside):
    """The norm, the factor and the quotient may be outside the range of the gradient, or fall between its numbers."""
    with jax.enable_x64(beside == "float64"):
        tree = {"w": jnp.linspace(-size, size, 7).astype(dtype), **({"b": jnp.full(3, 1e6, beside)} if beside else {})}
        found, _ = clip_by_global_norm(max_norm).update(tree, optax.EmptyState())
        exact = {name: np.asarray(g, np.float64) for name, g in tree.items()}
        factor = min(1, max_norm / np.sqrt(sum((g**2).sum() for g in exact.values())))
        for name, g in tree.items():
            assert found[name].dtype == g.dtype
            # Half of the last place of its dtype, and the roundings of float32 before.
            half_place = float(jnp.finfo(g.dtype).eps) / 2 + 6e-7
            smallest = float(jnp.finfo(g.dtype).smallest_subnormal) / 2
            wanted = exact[name] * factor
            np.testing.assert_allclose(np.asarray(found[name], np.float64), wanted, half_place, smallest)


def test_clipping_float32_beside_a_norm_that_only_float64_holds():
    with jax.enable_x64(True):
        tree = {"w": jnp.full(2, 1e18, jnp.float32), "b": jnp.full(1, 4e40, jnp.float64)}
        found, _ = clip_by_global_norm(1e38).update(tree, optax.EmptyState())
    np.testing.assert_allclose(found["w"], np.full(2, 2.5e15), rtol=1e-6)


def _program(*contexts) -> str:
    """A step that checks, measures and clips, compiled."""
    tx = mpjax.dynamic_loss_scaling(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)))
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}

    @jax.jit
    def step(gradients, state, params):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            updates, new = tx.update(gradients, state, params)
            return updates, new, global_norm(unscaled(gradients, state.scale))

    return step.lower(params, tx.init(params), params).compile().as_text()


def test_check_norm_and_clipping_take_one_sum_for_each_array():
    assert len(re.findall(r" reduce\(", _program())) == 2


def test_on_one_device_they_take_one_sum_for_all_small_arrays():
    assert len(re.findall(r" reduce\(", _program(added_together))) == 1


@pytest.mark.parametrize(("waits", "sums"), [(False, 3), (True, 2)])
def test_where_an_update_waits_one_sum_reads_all_large_arrays(waits, sums):
    """And one more adds up its rows. Where none waits, the kernel that updates an array adds its squares too."""
    tree = [jnp.zeros((300, 256)), jnp.zeros((256, 600), jnp.float16)]

    def total(tree):
        with added_together():
            return (~all_finite(tree)).astype(jnp.float32) + global_norm(tree) if waits else global_norm(tree)

    assert len(re.findall(r" reduce_sum", str(jax.make_jaxpr(total)(tree)))) == sums * (1 + waits)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (257, 256), (3, 3, 64, 128), (2, 40_000), (70_001,)])
def test_sums_of_all_arrays_together_are_those_of_each(shape, waits):
    """Of scalars, of what a kernel copies, and of what it adds up row by row, also where an update waits for it."""
    one_by_one, together = jax.jit(square_sum), jax.jit(functools.partial(square_sum))  # a trace each
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for bad in (None, np.inf, np.nan):
        if bad is not None:
            x.reshape(-1)[-1:] = bad
        tree = {"x": x, "half": np.full(10, 300, np.float16), "z": np.array([3 + 4j], np.complex64)}
        expected = one_by_one(tree)
        with added_together():
            if waits:
                all_finite({})
            found = together(tree)
        assert found.dtype == expected.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert square_sum({}) == 0
