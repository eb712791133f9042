"""Follows which values of a traced program were rounded to fewer bits than they were computed with.

A value that is rounded to bfloat16 and cast back has float32's dtype and bfloat16's bits: a product of it is in float32
by its operands alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from mpjax.plan.dtype_order import NARROWER, WIDER, compared, dtype_of_bits, narrowest
from mpjax.precision.casting.primitives import ARRANGES, CASTS, CHOOSES, SCALES, TAKES
from mpjax.precision.dtypes import is_floating


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
