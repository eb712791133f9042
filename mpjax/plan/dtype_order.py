"""Which of two dtypes is wider, by name, and which values of a traced program were rounded to fewer bits.

JAX has no arrays of some of them: tensorfloat32, MX formats. A value that is rounded to bfloat16 and cast back has
float32's dtype and bfloat16's bits: a product of it is in float32 by its operands alone.
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


_MOVES = CASTS | ARRANGES | TAKES | CHOOSES | {"abs", "neg"}
"""Primitives whose results are numbers of their operands: what was rounded stays so."""


def rounded_by(eqn: Any, given: Sequence[str]) -> str:
    """Returns the narrowest dtype that the results of an equation were rounded to since they were computed.

    A sum or a function of rounded numbers is not one of them, unless its dtype is as narrow: then it is rounded again.

    Args:
      eqn: the equation; not control flow, and no call.
      given: the same of each operand; empty for what was not rounded.

    Returns:
      The name of the dtype; empty if nothing was rounded, as far as it is known.
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
    if name in SCALES:  # by a number, or one for each row
        sizes = [var.aval.size for var in eqn.invars]
        if sizes[0] != sizes[1]:
            return given[sizes.index(max(sizes))]
    known = together(given)
    return own if known and compared([known], [own]) != WIDER else ""


def cast_by(eqn: Any, given: Sequence[str]) -> str:
    """Returns as `rounded_by`, but empty for the results of arithmetic, however narrow: they are computed so."""
    return rounded_by(eqn, given) if eqn.primitive.name in _MOVES or eqn.primitive.name in SCALES else ""


def together(found: Iterable[str]) -> str:
    """Returns the narrowest of several dtypes; empty if there is none.

    >>> together(["", "bfloat16", "float8_e4m3fn"])
    'float8_e4m3fn'
    """
    known = sorted(filter(None, found))
    return narrowest(known) if known else ""
