"""The rows of a receipt, and their verdicts: how the dtype that runs compares, by its bits, with the dtype asked for.

Dtypes are names here, because JAX has no arrays of some of them, such as tensorfloat32.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from mpjax.precision import dtypes
from mpjax.precision.casting.flops import TENSORFLOAT32


AS_ASKED, WIDER, NARROWER, MISSING, UNKNOWN = "as asked", "wider", "narrower", "missing", "unknown"

PRODUCTS = ("product", "convolution", "attention", "kernel")
"""The kinds of rows that count as products."""

RECIPE = "recipe"
"""The kind of a row that says that no product is in the float8 recipe that a policy asks for."""

NOT_TRACED = "no such product is in the traced function"
UNCLEAR = "the program's text does not say what computes it"

HALF = tuple(map(str, dtypes.HALF))

_BITS = {
    "float64": (11, 52),
    "float32": (8, 23),
    TENSORFLOAT32: (8, 10),
    "bfloat16": (8, 7),
    "float16": (5, 10),
}
"""Bits of exponent and mantissa."""


@dataclasses.dataclass(frozen=True)
class ReceiptRow:
    """A row of a receipt: the dtypes asked for and the dtypes that run, of equal products, sums or updates of a module.

    Attributes:
      path: the module path; empty outside of modules.
      direction: "forward", "backward", "update", or "other" for computations that are not differentiated.
      kind: "product", "convolution", "attention", "kernel" (of Pallas, with products inside), "reduction" (a sum over
        devices), "accumulation" (a sum of many terms on one device, if it is in half precision), "update" (of a
        parameter), or "recipe" (of a policy, if no product runs in it).
      asked: the dtype asked for, or the dtypes of both operands; empty if unknown.
      operands: the dtype in which the program multiplies or adds, or the dtypes of both operands; empty if nothing
        runs.
      accumulation: the dtype of the sums; empty if unknown.
      result: the dtype of the result.
      by: the library or kernel that computes it.
      count: the number of products, sums or updates of the row. The body of a loop counts once.
      verdict: "as asked", "wider" (lost speed), "narrower" (lost accuracy), "missing" or "unknown".
      reason: the reason of the verdict; empty if it is "as asked".
      note: how XLA arranged it: merged with another product, computed once, in a loop.
      device_limit: whether no program for this device could run it as asked.
    """

    path: str
    direction: str
    kind: str
    asked: str
    operands: str
    accumulation: str
    result: str
    by: str
    count: int
    verdict: str
    reason: str = ""
    note: str = ""
    device_limit: bool = False


def counted(rows: Sequence[ReceiptRow]) -> list[ReceiptRow]:
    """Merges rows that are equal except for their counts, and adds the counts; the order of first rows stays."""
    counts: dict[ReceiptRow, int] = {}
    for row in rows:
        key = dataclasses.replace(row, count=0)
        counts[key] = counts.get(key, 0) + row.count
    return [dataclasses.replace(row, count=count) for row, count in counts.items()]


def written(dtypes: Sequence[str]) -> str:
    """Formats the dtypes of operands as text; equal dtypes are written once, and no dtypes as an empty text.

    >>> written(["float8_e4m3fn", "float8_e5m2"])
    'float8_e4m3fn x float8_e5m2'
    """
    return " x ".join(dict.fromkeys(dtypes))


def compared(requested: Sequence[str], actual: Sequence[str]) -> str:
    """Compares the dtypes that run with the dtypes asked for, whatever their order: as asked, wider or narrower.

    A dtype with fewer bits of exponent or of mantissa is narrower: float16 instead of bfloat16, and the reverse. Both
    are sorted by bits and compared in pairs. The result is "narrower" if one pair is, else "wider" if one is.

    Both have at least one dtype. Raises ValueError if they differ in length, or if `bits_of` does not know a dtype.

    >>> compared(["float16", "float16"], ["float32", "float32"])
    'wider'
    """
    pairs = zip(sorted(requested, key=bits_of), sorted(actual, key=bits_of), strict=True)
    verdicts = {_one(bits_of(first), bits_of(second)) for first, second in pairs}
    return next(word for word in (NARROWER, WIDER, AS_ASKED) if word in verdicts)


def _one(requested: tuple[int, int], actual: tuple[int, int]) -> str:
    if requested == actual:
        return AS_ASKED
    return NARROWER if actual[0] < requested[0] or actual[1] < requested[1] else WIDER


def bits_of(dtype: str) -> tuple[int, int]:
    """The bits of exponent and mantissa of a floating dtype.

    >>> bits_of("float8_e4m3fn")
    (4, 3)

    Raises:
      ValueError: no floating dtype has this name.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.fullmatch(r"float\d+_e(\d+)m(\d+)\w*", dtype)
    if not match:
        raise ValueError(f"unknown floating dtype {dtype!r}")
    return int(match[1]), int(match[2])


def dtype_of_bits(exponent: int, mantissa: int) -> str:
    """Names a dtype with these bits of exponent and mantissa; unknown bits get a name made of them.

    >>> dtype_of_bits(8, 7), dtype_of_bits(4, 3)
    ('bfloat16', 'float8_e4m3')
    """
    known = {bits: dtype for dtype, bits in _BITS.items()}
    return known.get((exponent, mantissa), f"float{1 + exponent + mantissa}_e{exponent}m{mantissa}")


def narrowest(dtypes: Sequence[str]) -> str:
    """The dtype with the fewest bits of mantissa and, of equals, the fewest of exponent; `dtypes` is not empty."""
    return min(dtypes, key=lambda dtype: bits_of(dtype)[::-1])


def together(dtypes: Iterable[str]) -> str:
    """The narrowest of several dtypes, as `narrowest`, without empty names; empty if all are empty.

    >>> together(["", "bfloat16", "float8_e4m3fn"])
    'float8_e4m3fn'
    """
    known = sorted(filter(None, dtypes))
    return narrowest(known) if known else ""
