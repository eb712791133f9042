"""Which of two dtypes is wider, by name, also those that JAX has no arrays of: tensorfloat32, MX formats."""

import re
from collections.abc import Sequence

from mpjax.precision.casting.flops import TENSORFLOAT32


AS_ASKED, WIDER, NARROWER, MISSING, UNKNOWN = "as asked", "wider", "narrower", "missing", "unknown"

_BITS = {
    "float64": (11, 52),
    "float32": (8, 23),
    TENSORFLOAT32: (8, 10),
    "bfloat16": (8, 7),
    "float16": (5, 10),
}
"""Bits of exponent and mantissa."""

HALF = ("float16", "bfloat16")


def bits_of(dtype: str) -> tuple[int, int]:
    """Returns the bits of exponent and mantissa.

    >>> bits_of("float8_e4m3fn")
    (4, 3)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.fullmatch(r"float\d+_e(\d+)m(\d+)\w*", dtype)
    if not found:
        raise ValueError(f"unknown floating dtype {dtype!r}")
    return int(found[1]), int(found[2])


def dtype_of_bits(exponent: int, mantissa: int) -> str:
    """Returns the name of a dtype with these bits; several have them.

    >>> dtype_of_bits(8, 7), dtype_of_bits(4, 3)
    ('bfloat16', 'float8_e4m3')
    """
    known = {bits: dtype for dtype, bits in _BITS.items()}
    return known.get((exponent, mantissa), f"float{1 + exponent + mantissa}_e{exponent}m{mantissa}")


def compared(asked: Sequence[str], runs: Sequence[str]) -> str:
    """Returns whether dtypes are those asked for, wider or narrower, whatever their order.

    A dtype that has fewer bits of exponent or of mantissa is narrower: float16 instead of bfloat16, and the reverse.

    >>> compared(["float16", "float16"], ["float32", "float32"])
    'wider'
    """
    pairs = zip(sorted(asked, key=bits_of), sorted(runs, key=bits_of), strict=True)
    found = {_one(bits_of(first), bits_of(second)) for first, second in pairs}
    return next(word for word in (NARROWER, WIDER, AS_ASKED) if word in found)


def narrowest(dtypes: Sequence[str]) -> str:
    """Returns the dtype with the fewest bits of mantissa, of several the one with the fewest of exponent."""
    return min(dtypes, key=lambda dtype: bits_of(dtype)[::-1])


def _one(asked: tuple[int, int], runs: tuple[int, int]) -> str:
    if asked == runs:
        return AS_ASKED
    return NARROWER if runs[0] < asked[0] or runs[1] < asked[1] else WIDER
