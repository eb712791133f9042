"""Rounding by chance: one of two neighbours, right in the mean, and nothing that half precision cannot say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.precision import seed_of, stochastic_bfloat16, stochastic_round


HALVES = pytest.mark.parametrize("half", ["float16", "bfloat16"])
INF = float("inf")
DRAWS = 20_000


def rounded(values, half, seed=0):
    return jax.jit(stochastic_round, static_argnums=1)(jnp.asarray(values, jnp.float32), half, jax.random.key(seed))


def around(value, half):
    """The largest half-precision number not above `value`, and the smallest not below, as Python floats."""
    nearest = np.float32(value).astype(half)
    towards = np.asarray(np.inf if float(nearest) < value else -np.inf, nearest.dtype)
    other = nearest if float(nearest) == value else np.nextafter(nearest, towards)
    return sorted((float(nearest), float(other)))


CASES = {
    "one and a little": 1.0001,
    "negative": -3.3003,
    "at a power of two": 0.49999,
    "large": 12345.678,
    "half way": 2.001953125,
    "subnormal in float16": 3.3e-6,
    "negative subnormal in float16": -7.7e-7,
    "below float16's smallest": 1e-8,
    "near float16's largest": 65490.0,
}


@HALVES
@pytest.mark.parametrize("value", CASES.values(), ids=CASES)
def test_the_mean_is_the_value_and_every_draw_a_neighbour(value, half):
    value = float(np.float32(value))
    low, high = around(value, half)
    drawn = np.asarray(rounded(np.full(DRAWS, value), half).astype(jnp.float32), np.float64)
    assert set(drawn) <= {low, high}
    # Five standard deviations of a mean of draws that differ by `high - low`.
    assert abs(drawn.mean() - value) <= 5 * (high - low) / (2 * DRAWS**0.5)
    if low < high:
        share = (value - low) / (high - low)
        assert (drawn == high).mean() == pytest.approx(share, abs=0.02)


@HALVES
def test_what_half_precision_can_say_stays_as_it_is(half):
    values = jnp.array([0.0, -0.0, 1.0, -2.5, 0.333251953125 if half == "float16" else 0.333984375], jnp.float32)
    many = jnp.broadcast_to(values, (1000, 5))
    out = rounded(many, half).astype(jnp.float32)
    assert np.asarray(out).tobytes() == np.asarray(many).tobytes()  # the sign of zero too


@HALVES
def test_infinities_and_nan_pass(half):
    out = np.asarray(rounded([INF, -INF, float("nan")], half), np.float32)
    assert out[:2].tolist() == [INF, -INF]
    assert np.isnan(out[2])


def test_beyond_the_largest_it_rounds_as_a_cast_does():
    many = np.tile([65505.0, 65519.0, 65520.0, -65519.0, 1e6], (1000, 1))
    assert np.unique(np.asarray(rounded(many, "float16"), np.float32), axis=0).tolist() == [
        [65504.0, 65504.0, INF, -65504.0, INF]
    ]


def test_fused_it_rounds_as_a_cast_does_beyond_the_largest_too():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    values = np.float32(
        [largest, np.nextafter(np.float32(largest), np.float32(INF)), np.finfo(np.float32).max, -largest]
    )
    found = {tuple(map(float, stochastic_bfloat16(values, jnp.uint32(seed)))) for seed in range(200)}
    assert found == {(largest, largest, INF, -largest)}


@pytest.mark.slow
@HALVES
@settings(max_examples=60)
@given(
    values=st.lists(
        st.floats(-60000, 60000, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30), min_size=64, max_size=64
    ),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_value_becomes_one_of_its_two_neighbours(half, values, seed):
    for value, out in zip(values, np.asarray(rounded(values, half, seed), np.float32), strict=True):
        assert float(out) in around(value, half)


@HALVES
def test_the_key_decides(half):
    values = jnp.full(100, 1.0003, jnp.float32)
    one, again, other = (np.asarray(rounded(values, half, seed), np.float32) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert len(set(one)) == 2  # each element by its own number


def test_outside_jit_it_is_the_same():
    values = jnp.linspace(-3.0, 3.0, 50, dtype=jnp.float32)
    outside = stochastic_round(values, "bfloat16", jax.random.key(0))
    assert np.asarray(outside).tobytes() == np.asarray(rounded(values, "bfloat16")).tobytes()


@pytest.mark.slow
def test_every_array_of_every_update_has_a_seed_of_its_own():
    seeds = [seed_of(seed, jnp.int32(draws), number) for seed in (0, 1) for draws in range(20) for number in range(20)]
    assert len({int(each) for each in seeds}) == 800
    bits = np.unpackbits(np.asarray(seeds, np.uint32).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.02  # 25,600 bits: a standard error of 0.003
    assert int(seed_of(2**32 + 1, jnp.int32(3), 4)) == int(seed_of(1, jnp.int32(3), 4))
