"""Rounds values to the block formats MXFP8 and NVFP4, in which each block of consecutive values has one scale.

A diagnosis estimates the noise that these formats would cause. NumPy computes it on concrete values, so that the bits
do not depend on a compiler.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

from mpjax.precision.float8.recipes import E4M3
from mpjax.precision.float8.scaling import BLOCK


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of blocks along the last axis.

    Attributes:
      name: the name in a table.
      size: the number of values that share a scale.
      payload: the dtype of the values, divided by their scales.
      scale: the dtype of the scales.
      whole: True if the array also has one float32 scale, chosen so that the largest scale of a block is the largest
        number of `scale`.
    """

    name: str
    size: int
    payload: np.dtype
    scale: np.dtype
    whole: bool = False

    def __str__(self) -> str:
        return self.name


MXFP8 = BlockFormat("mxfp8", BLOCK, E4M3, np.dtype(ml_dtypes.float8_e8m0fnu))
"""Blocks of 32 in e4m3, each with a power of two as its scale (Open Compute Project, "Microscaling Formats (MX)
Specification", version 1.0, 2023). The power is rounded up, as in cuDNN, so that no value saturates.
"""

NVFP4 = BlockFormat("nvfp4", 16, np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn), whole=True)
"""Blocks of 16 in e2m1, each with a scale in e4m3, and one float32 scale for the array (NVIDIA, "Pretraining Large
Language Models with NVFP4", 2025, arXiv:2509.25149).
"""


def round_in_blocks(values: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Rounds float32 values to the nearest numbers of a block format, ties to even. The result stays float32.

    Blocks are consecutive values along the last axis. A block that contains inf or NaN becomes NaN. Values beyond the
    largest number saturate, which happens if the scale of their block was rounded down. A block whose scale underflows
    to zero becomes zero. A result beyond float32 becomes inf.

    Args:
      values: float32 [..., K]; the last block may be shorter.
      format: the block format.
    """
    values = np.asarray(values, np.float32)
    if not values.size:
        return values
    missing = -values.shape[-1] % format.size
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    blocks = padded.reshape(*padded.shape[:-1], -1, format.size)
    with np.errstate(all="ignore"):  # _rounded handles inf and NaN
        rounded = _rounded(blocks, format)
    return rounded.reshape(padded.shape)[..., : values.shape[-1]]


def sqnr_in_blocks(values: np.ndarray, format: BlockFormat) -> float:
    """The signal-to-quantisation-noise ratio of values in a block format, in decibels, at most 200.

    The ratio is ten times the decimal logarithm of the sum of squares over the sum of squares of the rounding errors.
    It is 200 if nothing is lost, NaN if a value is not finite, and -inf if a finite value is rounded to inf.

    Args:
      values: float32 [..., K].
      format: the block format.
    """
    if not np.isfinite(values).all():
        return math.nan
    exact = np.asarray(values, np.float64)
    noise = float(np.sum(np.square(exact - round_in_blocks(values, format))))
    if not noise:
        return 200.0
    ratio = float(np.sum(np.square(exact))) / noise
    return min(200.0, 10 * math.log10(ratio)) if ratio else -math.inf


def _rounded(blocks: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Rounds blocks float32 [..., number of blocks, block size] as in `round_in_blocks`."""
    top = np.float64(float(ml_dtypes.finfo(format.payload).max))
    exact = blocks.astype(np.float64)  # float64 represents quotients by powers of two exactly
    largest = np.max(np.abs(exact), axis=-1, keepdims=True)
    factor = _for_all(largest, top, format) if format.whole else np.float64(1)
    scale = _powers(largest / top) if not format.whole else (largest / top * factor).astype(format.scale)
    scale = scale.astype(np.float64)
    scaled = np.where((scale == 0) | ~np.isfinite(largest), 0, exact / scale * factor)
    # A cast to e2m1 saturates. In e4m3 nothing saturates, because the scales are rounded up.
    result = scaled.astype(format.payload).astype(np.float64) * scale / factor
    return np.where(np.isfinite(largest), result, np.nan).astype(np.float32)


def _for_all(largest: np.ndarray, top: np.float64, format: BlockFormat) -> np.float64:
    """The factor by which a whole array is multiplied, so that its largest block gets the largest scale.

    It is the inverse of the array's float32 scale, at most float32's largest number; 1 if all finite blocks are zero.

    Args:
      largest: the largest magnitude of each block; blocks with inf or NaN are ignored.
      top: the largest number of the payload dtype.
      format: the block format.
    """
    whole = np.max(largest, where=np.isfinite(largest), initial=0.0)
    if not whole:
        return np.float64(1)
    inverse = min(float(ml_dtypes.finfo(format.scale).max) * top / whole, float(np.finfo(np.float32).max))
    return np.float64(np.float32(inverse))


def _powers(ratio: np.ndarray) -> np.ndarray:
    """The smallest powers of two at or above `ratio`, from 2^-127 to 2^127 as in e8m0; 2^-127 for a ratio of zero."""
    mantissa, exponent = np.frexp(ratio)
    power = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.ldexp(1.0, np.clip(np.where(ratio > 0, power, -127), -127, 127))
