"""Measures one result on the device: the sums and maxima that make up a reading."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.compile_ahead import compiled


EXPONENTS = range(-48, 40)
"""The bins of the histogram: bin e counts the values in [2^e, 2^(e+1)). The outermost bins have no outer bound."""

_SAMPLE, _BLOCK = 4096, 2**14


class Marks(NamedTuple):
    """What is known of a value's history, as arrays that loops can carry.

    Attributes:
      finite: True if the whole value is finite in half precision.
      reference_finite: True if the whole value is finite in the reference.
      flushed: the index of the latest site with underflow to zero that the value depends on; -1 if none.
    """

    finite: Any = np.True_
    reference_finite: Any = np.True_
    flushed: Any = np.int32(-1)


Measured = dict[str, Any]
"""The fields of a `Reading` as arrays; sums of squares are as in `SQUARES`."""

LARGEST = frozenset({"largest", "flushed"})
"""The fields that are combined by their maximum. All other fields are summed."""

SQUARES = frozenset({"lost", "exact", "noise", "error", "reference"})
"""The fields that are sums of squares.

On the device each is a scale and the sum of squares relative to that scale, because float32 cannot represent the sum.
"""


def _measure_numpy(wide, exact, low, smallest_normal, rounds) -> Measured:
    wide, exact, low = (np.ravel(values) for values in (wide, exact, low))
    sums = _sums(np, wide, exact, low, smallest_normal, rounds)
    return {**sums, "size": np.float32(low.size), "sample": _sample(np, wide)}


@functools.partial(compiled, numpy=_measure_numpy)
def measure(wide, exact, low, smallest_normal, rounds) -> Measured:
    """Computes the counts, maxima and sums of a `Reading`, with two entries more and without the histogram and history.

    The entry "all_non_finite" counts all values that are not finite in half precision, whether or not they are finite
    in the reference. The entry "sample" [4096] holds magnitudes for `histogram`. Each shape is compiled once:
    `smallest_normal` and `rounds` are arrays, so that they cause no further compilation.

    Args:
      wide: the result in the reference, of any shape.
      exact: the result in half precision, before rounding.
      low: the result in half precision, after rounding; all three have the same dtype.
      smallest_normal: the smallest normal number of the dtype of the rounding.
      rounds: True if that dtype is half precision or float8; otherwise nothing counts as overflow or underflow.
    """
    wide, exact, low = (jnp.ravel(values) for values in (wide, exact, low))
    size = low.size

    def block(index):
        start = jnp.minimum(index * _BLOCK, size - _BLOCK)
        new = start + jnp.arange(_BLOCK) >= index * _BLOCK

        def cut(values):
            return jnp.where(new, jax.lax.dynamic_slice(values, (start,), (_BLOCK,)), jnp.zeros((), values.dtype))

        return _sums(jnp, cut(wide), cut(exact), cut(low), smallest_normal, rounds)

    if size <= _BLOCK:
        sums = _sums(jnp, wide, exact, low, smallest_normal, rounds)
    else:
        # In blocks, because temporaries for all values at once would take several times the memory of the result.
        sums = jax.lax.fori_loop(1, -(-size // _BLOCK), lambda index, sums: joined(sums, block(index)), block(0))
    return {**sums, "size": jnp.float32(size), "sample": _sample(jnp, wide)}


def _sums(xp, wide, exact, low, smallest_normal, rounds) -> Measured:
    """Computes the sums of values [n] in one dtype, in `xp`: NumPy or JAX.

    In JAX these are two reductions, each with one pass and one kernel to compile.
    """
    finite, wide_finite = xp.isfinite(low), xp.isfinite(wide)
    both = finite & wide_finite
    size = xp.where(finite, xp.abs(low), 0.0)
    underflow = (low == 0) & (exact != 0) & rounds
    squared = {
        "lost": xp.where(underflow, exact, 0.0),
        "exact": xp.where(xp.isfinite(exact), exact, 0.0),
        "noise": xp.where(finite & xp.isfinite(exact), low - exact, 0.0),
        "error": xp.where(both, low - wide, 0.0),
        "reference": xp.where(both, wide, 0.0),
    }
    tops = {"largest": size, **{name: xp.abs(values) for name, values in squared.items()}}
    largest, *scales = _reduced(xp, "maximum", *tops.values())
    over = [xp.where(scale > 0, scale, xp.ones_like(scale)) for scale in scales]
    counted = {
        "non_finite": ~finite & wide_finite,
        "reference_non_finite": ~wide_finite,
        "all_non_finite": ~finite,
        "overflow": xp.isfinite(exact) & ~finite & rounds,
        "underflow": underflow,
        "subnormal": (size > 0) & (size < smallest_normal),
    }
    columns = [size, *counted.values(), *(xp.square(x / s) for x, s in zip(squared.values(), over, strict=True))]
    total, *sums = _reduced(xp, "add", *(column.astype(xp.float32) for column in columns))
    counts, squares = sums[: len(counted)], sums[len(counted) :]
    return {
        "largest": largest.astype(xp.float32),
        "total": total,
        **dict(zip(counted, counts, strict=True)),
        **{
            name: (scale.astype(xp.float32), value) for name, scale, value in zip(squared, scales, squares, strict=True)
        },
    }


def _reduced(xp, combine: str, *columns) -> Sequence:
    """Reduces columns [n] to scalars by "add" or "maximum". In JAX it is one reduction of all columns."""
    if xp is np:
        return [getattr(np, combine).reduce(column, initial=0) for column in columns]
    zeros = tuple(np.zeros((), column.dtype) for column in columns)
    both = getattr(jnp, combine)
    return jax.lax.reduce(columns, zeros, lambda first, second: tuple(map(both, first, second)), (0,))


@jax.jit
def onward(non_finite, reference_non_finite, underflow, marks: tuple[Marks, ...], number) -> tuple[Measured, Marks]:
    """Computes the fields "begins", "reference_begins" and "flushed" of a reading, and the marks of its result.

    Args:
      non_finite: the number of values of the result that are not finite in half precision.
      reference_non_finite: the number of values that are not finite in the reference.
      underflow: the number of values that underflow to zero.
      marks: the marks of the operands; empty for an input.
      number: the index of the result's site.
    """
    flushed = functools.reduce(jnp.maximum, (mark.flushed for mark in marks), jnp.int32(-1))
    got_finite = functools.reduce(jnp.logical_and, (mark.finite for mark in marks), True)
    got_reference_finite = functools.reduce(jnp.logical_and, (mark.reference_finite for mark in marks), True)
    finite, reference_finite = non_finite == 0, reference_non_finite == 0
    begins = {
        "begins": (got_finite & ~finite & reference_finite).astype(jnp.float32),
        "reference_begins": (got_reference_finite & ~reference_finite).astype(jnp.float32),
        "flushed": flushed,
    }
    return begins, Marks(finite, reference_finite, jnp.where(underflow > 0, number, flushed))


def _sample(xp, flat):
    """The magnitudes of at most 4,096 values, padded with zeros to [4096]. Values that are not finite become zero."""
    stride = max(1, -(-flat.size // _SAMPLE))
    while math.gcd(stride, flat.size) > 1:  # else a stride of 4 would see one of 4 channels
        stride += 1
    sample = xp.abs(flat[::stride])
    counted = xp.where(xp.isfinite(sample), sample, xp.zeros((), sample.dtype))
    return xp.pad(counted, (0, _SAMPLE - counted.size))


@compiled
def histogram(sample) -> jax.Array:
    """Counts the positive values of a sample by exponent, float32 [88].

    All samples have the same length, so that this function is compiled once. Of all parts of a reading, it takes
    longest to compile.
    """
    bins = jnp.clip(jnp.frexp(sample)[1] - 1 - EXPONENTS.start, 0, len(EXPONENTS) - 1)
    return jnp.zeros(len(EXPONENTS), jnp.float32).at[bins].add(jnp.where(sample > 0, 1.0, 0.0))


def stacked(measured: Sequence[Measured]) -> Measured:
    """Stacks the readings of sites along a new first axis; empty if there are none."""
    return jax.tree.map(lambda *values: jnp.stack(values), *measured) if measured else {}


def apart(measured: Measured, count: int) -> list[Measured]:
    """Splits stacked readings into a list of the readings of `count` sites: the opposite of `stacked`."""
    return [jax.tree.map(lambda values, row=row: values[row], measured) for row in range(count)]


def none_like(shapes: Measured) -> Measured:
    """Makes the initial readings of a loop, which count nothing.

    Args:
      shapes: readings as abstract arrays, whose shapes and dtypes the new readings have.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return zeros | ({"flushed": zeros["flushed"] - 1} if "flushed" in zeros else {})


def joined(first: Measured, second: Measured) -> Measured:
    """Combines two readings into one, on the device: adds sums and counts, and keeps the larger maxima (`LARGEST`).

    Sums of squares with different scales are brought to the larger scale first.
    """

    def join(name, a, b):
        if name in LARGEST:
            return jnp.maximum(a, b)
        if name not in SQUARES:
            return a + b
        scale = jnp.maximum(a[0], b[0])
        over = jnp.where(scale > 0, scale, 1.0)
        return scale, a[1] * jnp.square(a[0] / over) + b[1] * jnp.square(b[0] / over)

    return {name: join(name, value, second[name]) for name, value in first.items()}
