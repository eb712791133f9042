"""Orders dtypes by their bits, and finds the values of a traced program that were rounded to fewer bits.

JAX has no arrays of some of these dtypes: tensorfloat32, MX formats. A value that is rounded to bfloat16 and cast back
has float32's dtype and bfloat16's bits. By its operands alone, a product of it is in float32.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mpjax.precision.casting.flops import TENSORFLOAT32
from mpjax.precision.casting.primitives import ARRANGES, CASTS, CHOOSES, SCALES, TAKES
from mpjax.precision.dtypes import is_floating


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
    """The bits of exponent and mantissa of a floating dtype.

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
    """The name of a dtype with these bits; several dtypes may have them.

    >>> dtype_of_bits(8, 7), dtype_of_bits(4, 3)
    ('bfloat16', 'float8_e4m3')
    """
    known = {bits: dtype for dtype, bits in _BITS.items()}
    return known.get((exponent, mantissa), f"float{1 + exponent + mantissa}_e{exponent}m{mantissa}")


def compared(asked: Sequence[str], runs: Sequence[str]) -> str:
    """Compares the dtypes that run with the dtypes asked for, whatever their order: as asked, wider or narrower.

    A dtype with fewer bits of exponent or of mantissa is narrower: float16 instead of bfloat16, and the reverse.

    >>> compared(["float16", "float16"], ["float32", "float32"])
    'wider'
    """
    pairs = zip(sorted(asked, key=bits_of), sorted(runs, key=bits_of), strict=True)
    found = {_one(bits_of(first), bits_of(second)) for first, second in pairs}
    return next(word for word in (NARROWER, WIDER, AS_ASKED) if word in found)


def narrowest(dtypes: Sequence[str]) -> str:
    """The dtype with the fewest bits of mantissa; among equals, with the fewest bits of exponent."""
    return min(dtypes, key=lambda dtype: bits_of(dtype)[::-1])


def _one(asked: tuple[int, int], runs: tuple[int, int]) -> str:
    if asked == runs:
        return AS_ASKED
    return NARROWER if runs[0] < asked[0] or runs[1] < asked[1] else WIDER


_MOVES = CASTS | ARRANGES | TAKES | CHOOSES | {"abs", "neg"}
"""Primitives whose results consist of values of their operands: rounded values stay rounded."""


def rounded_by(eqn: Any, given: Sequence[str]) -> str:
    """The narrowest dtype that the results of an equation were rounded to since they were computed.

    A sum or a function of rounded numbers is not rounded, unless its dtype is as narrow: then it is rounded again.

    Args:
      eqn: the equation; neither control flow nor a call.
      given: the narrowest dtype that each operand was rounded to; empty for no rounding.

    Returns:
      The name of the dtype; empty if no rounding is known.
    """
    if not eqn.outvars or not is_floating(eqn.outvars[0].aval):
        return ""
    name, own = eqn.primitive.name, str(eqn.outvars[0].aval.dtype)
    if name in CASTS:
        source = eqn.invars[0].aval
        bits = eqn.params.get("exponent_bits"), eqn.params.get("mantissa_bits")
        target = dtype_of_bits(*bits) if name == "reduce_precision" else own
        rounds = is_floating(source) and compared([str(source.dtype)], [target]) == NARROWER
        return together([given[0], target if rounds else ""])
    if name in _MOVES:
        return together(given)
    if name in SCALES:  # by a scalar, or by a scalar for each row
        sizes = [var.aval.size for var in eqn.invars]
        if sizes[0] != sizes[1]:
            return given[sizes.index(max(sizes))]
    known = together(given)
    return own if known and compared([known], [own]) != WIDER else ""


def cast_by(eqn: Any, given: Sequence[str]) -> str:
    """As `rounded_by`, but empty for the results of arithmetic, however narrow: they are computed in their dtype."""
    return rounded_by(eqn, given) if eqn.primitive.name in _MOVES or eqn.primitive.name in SCALES else ""


def together(found: Iterable[str]) -> str:
    """The narrowest of several dtypes; empty if all are empty.

    >>> together(["", "bfloat16", "float8_e4m3fn"])
    'float8_e4m3fn'
    """
    known = sorted(filter(None, found))
    return narrowest(known) if known else ""
