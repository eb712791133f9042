"""Rounding by arithmetic against NumPy's float16 and ml_dtypes' bfloat16, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.diagnosis import in_half_dtype, round_to
from mpjax.precision import BFLOAT16, FLOAT16, FLOAT32


def _same(a, b) -> np.ndarray:
    """Whether float32 arrays agree bit for bit, any nan taken for any other."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


def _hard_cases(half) -> np.ndarray:
    """Every number of a half dtype, those next to it in float32, the middle to the next one, and those next to that."""
    every = np.arange(65536, dtype=np.uint16).view(half).astype(np.float32).view(np.uint32)
    middle = 0x1000 if half is np.float16 else 0x8000
    near = [every + np.uint32(step) for step in (0, 1, middle - 1, middle, middle + 1)]
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([*near, every - np.uint32(1), random]).view(np.float32)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["one by one", "compiled"])
def test_equals_a_cast_bit_for_bit(half, compiled):
    values = _hard_cases(half)
    function = jax.jit(round_to, static_argnums=1) if compiled else round_to
    with np.errstate(all="ignore"):
        wanted = values.astype(half).astype(np.float32)
    assert _same(function(jnp.asarray(values), np.dtype(half)), wanted).all()


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (65519.0, 65504.0),
        (65520.0, np.inf),  # the middle between the largest number and the next that there would be
        (-65520.0, -np.inf),
        (2.0**-25, 0.0),  # a tie, to even
        (2.0**-25 * 1.001, 2.0**-24),
        (3 * 2.0**-25, 2.0**-23),
        (2049.0, 2048.0),
        (2051.0, 2052.0),
        (-1e-8, -0.0),
        (np.inf, np.inf),
        (np.nan, np.nan),
    ],
)
def test_float16_by_hand(value, rounded):
    assert _same(round_to(jnp.float32(value), FLOAT16), rounded).all()


def test_bfloat16_keeps_float32s_range():
    assert float(round_to(jnp.float32(2.0**100 * 1.006), BFLOAT16)) == 2.0**100 * 1.0078125
    assert float(round_to(jnp.float32(3.4e38), BFLOAT16)) == np.inf
    assert float(round_to(jnp.float32(257.0), BFLOAT16)) == 256.0


def test_without_range_float16_has_eleven_bits_everywhere():
    values = jnp.float32([2049.0, 2049.0 * 2**20, 2051.0 * 2.0**-60, 1e-8, 1e30])
    rounded = np.asarray(round_to(values, FLOAT16, top=False, bottom=False), np.float64)
    assert rounded[:3].tolist() == [2048.0, 2048.0 * 2**20, 2052.0 * 2.0**-60]
    assert np.abs(rounded[3:] / [1e-8, 1e30] - 1).max() < 2.0**-11


def test_other_dtypes_are_left_alone():
    assert float(round_to(jnp.float32(2049.1), FLOAT32)) == float(np.float32(2049.1))


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_every_half_number_is_the_same_in_its_own_dtype(half):
    every = np.arange(65536, dtype=np.uint16).view(half).astype(np.float32)
    held = in_half_dtype(jnp.asarray(every), np.dtype(half))
    assert held.dtype == half
    assert _same(np.asarray(held).astype(np.float32), every).all()
    assert _same(held.astype(jnp.float32), every).all()
