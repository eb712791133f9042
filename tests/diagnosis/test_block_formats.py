"""Rounding to blocks that share a scale, beside the numbers that ml_dtypes lists, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from mpjax.diagnosis import MXFP8, NVFP4, BlockFormat, round_in_blocks, sqnr_in_blocks
from mpjax.precision.float8 import E4M3, quantise_blocks


EVERY = np.arange(2**16, dtype=np.uint16)
SPREAD = np.random.default_rng(0).normal(size=2**16) * np.exp2(np.random.default_rng(1).integers(-20, 20, 2**16))
VALUES = {
    "every bfloat16": EVERY.view(ml_dtypes.bfloat16).astype(np.float32),
    "every bfloat16, mixed": np.random.default_rng(3).permutation(EVERY).view(ml_dtypes.bfloat16).astype(np.float32),
    "every float16": EVERY.view(np.float16).astype(np.float32),
    "every float16, mixed": np.random.default_rng(4).permutation(EVERY[:31744]).view(np.float16).astype(np.float32),
    "float32 of many sizes": SPREAD.astype(np.float32),
    "float32 of one size": np.random.default_rng(2).normal(size=2**16).astype(np.float32),
}


def numbers_of(dtype) -> np.ndarray:
    """Returns the finite numbers of a dtype from zero up, by their codes: even codes stand at even places."""
    bits = 4 if dtype == NVFP4.payload else 8
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(dtype).astype(np.float64)
    return codes[np.isfinite(codes)]


def nearest(values: np.ndarray, dtype) -> np.ndarray:
    """Rounds to the nearest of the numbers of a dtype, ties to the even code, the largest beyond it."""
    numbers = numbers_of(dtype)
    above = np.clip(np.searchsorted(numbers, np.abs(values)), 1, len(numbers) - 1)
    down, up = np.abs(values) - numbers[above - 1], numbers[above] - np.abs(values)
    upwards = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(numbers[np.where(upwards, above, above - 1)], values)


def by_the_numbers(values: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Rounds block by block, with scales found among all that there are."""
    rows = values.reshape(-1, format.size).astype(np.float64)
    top = numbers_of(format.payload)[-1]
    powers = np.exp2(np.arange(-127.0, 128.0))
    sizes = np.abs(rows).max(1)
    whole = 448 * top / np.max(sizes, where=np.isfinite(sizes), initial=0.0)
    factor = float(np.float32(whole)) if format.whole else 1.0
    result = np.full(rows.shape, np.nan)
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        if not np.isfinite(size):
            continue
        if format.whole:
            scale = float(nearest(np.float64(size / top * factor), format.scale))
        else:
            scale = powers[np.flatnonzero(powers * top >= size)[0]]
        result[number] = nearest(row / scale * factor, format.payload) * scale / factor if scale else 0.0
    return result.astype(np.float32).reshape(values.shape)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(values, id=name, marks=pytest.mark.slow if name in ("every bfloat16", "every float16") else [])
        for name, values in VALUES.items()
    ],
)
@pytest.mark.parametrize("format", [MXFP8, NVFP4], ids=str)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast")
def test_every_value_is_the_nearest_number_of_its_block(values, format):
    np.testing.assert_array_equal(round_in_blocks(values, format), by_the_numbers(values, format))


@pytest.mark.parametrize("values", [VALUES["float32 of many sizes"], VALUES["float32 of one size"]])
def test_blocks_of_mx_are_those_of_the_recipe(values):
    found = quantise_blocks(values.reshape(64, 1024), E4M3)
    multiplied_out = np.asarray(found.values, np.float32) * np.repeat(np.asarray(found.inverse), 32, axis=1)
    np.testing.assert_array_equal(round_in_blocks(values.reshape(64, 1024), MXFP8), multiplied_out)


def test_numbers_of_the_formats():
    assert numbers_of(NVFP4.payload).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (numbers_of(MXFP8.payload)[-1], (MXFP8.size, NVFP4.size)) == (448, (32, 16))
    values = np.array([[0.3, 0.8, -2.4, 5.1, 6.0]], np.float32)
    # The one block has the largest scale, 448, with which its largest value is 6.
    np.testing.assert_allclose(round_in_blocks(values, NVFP4), [[0.5, 1.0, -2.0, 6.0, 6.0]], rtol=1e-6)
    assert not np.isin(values, round_in_blocks(values, MXFP8)).all()


@pytest.mark.parametrize("format", [MXFP8, NVFP4], ids=str)
def test_an_outlier_costs_its_own_block_only(format):
    values = np.ones((2, 64), np.float32)
    values[0, 0] = 2.0**18
    rounded = round_in_blocks(values, format)
    assert (rounded[0, 1 : format.size] == 0).all()
    assert (rounded[1] == 1).all() or format is NVFP4
    values[0, 0] = np.inf
    rounded = round_in_blocks(values, format)
    assert np.isnan(rounded[0, : format.size]).all()
    assert (rounded[1] == 1).all()


def test_noise_in_decibels():
    assert sqnr_in_blocks(np.ones((4, 32), np.float32), MXFP8) == 200
    assert sqnr_in_blocks(np.zeros((4, 32), np.float32), NVFP4) == 200
    normal = VALUES["float32 of one size"].reshape(64, 1024)
    # Three bits of mantissa have about 31.5 dB; one bit, with a finer scale, about 20.
    assert sqnr_in_blocks(normal, MXFP8) == pytest.approx(31.5, abs=0.5)
    assert sqnr_in_blocks(normal, NVFP4) == pytest.approx(20.5, abs=1.0)
    assert np.isnan(sqnr_in_blocks(np.array([[np.inf]], np.float32), MXFP8))


def test_a_value_that_is_rounded_to_inf_has_infinite_noise():
    """The next number of MXFP8 above 3.298e38 is 2^128, which float32 does not hold."""
    assert sqnr_in_blocks(np.full((1, 32), 3.298e38, np.float32), MXFP8) == -np.inf
