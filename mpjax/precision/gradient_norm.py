"""The sum of the squares of gradients, from which come their norm, clipping, and whether all values are finite.

A step may use it several times: to skip a step, to report the norm, to clip. XLA computes it once, because all uses
trace the same operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def square_sum(tree: Any) -> Float[Array, ""]:
    """Sums the squares of all floating and complex values in a tree, in float32 or wider.

    The sum is NaN if and only if one of the values is inf or NaN. It is inf if all values are finite and their squares
    overflow, and 0 if there are no such values.

    >>> square_sum({"w": jnp.array([3.0, 4.0]), "b": jnp.float16(300)}), square_sum(jnp.float32("inf"))
    (Array(90025., dtype=float32), Array(nan, dtype=float32))
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size]
    arrays = [array for leaf in leaves for array in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    if not arrays:
        return jnp.zeros((), FLOAT32)
    dtype = widest(FLOAT32, *(array.dtype for array in arrays))
    together = _TOGETHER.get()
    if together is None:
        return sum((jnp.sum(_squares(array)).astype(dtype) for array in arrays), jnp.zeros((), dtype))
    partial = jnp.concatenate([sums.astype(dtype) for sums in _partial_sums(arrays, together)])
    # Without a barrier, XLA would finish the sum of each array separately after all.
    return jnp.sum(jax.lax.optimization_barrier(partial))


@dataclasses.dataclass
class _Together:
    """The state of an `added_together` block.

    Attributes:
      first: True once `all_finite` or clipping was traced in the block: updates then wait for the sum, so that the
        kernels of updates cannot compute it.
    """

    first: bool = False


_TOGETHER: contextvars.ContextVar[_Together | None] = contextvars.ContextVar("_TOGETHER", default=None)


@contextlib.contextmanager
def added_together() -> Iterator[None]:
    """Context for tracing: inside the `with` block, `square_sum` finishes the sums of all arrays in one kernel.

    Outside, each array has a kernel of its own for its sum. `global_norm`, `all_finite` and clipping use `square_sum`
    too. Use it for arrays on one device. For arrays that are sharded over devices, it would gather the partial sums.

    From the first `all_finite` or clipping in the block on, updates wait for the sum, and one kernel reads up to `MOST`
    arrays. Before, and without them, the kernel that updates a large array may sum its squares too.
    """
    token = _TOGETHER.set(_Together())
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def _square_sum_first(tree: Any) -> Float[Array, ""]:
    """Computes `square_sum` where updates wait for the result, and tells the `added_together` block so."""
    if together := _TOGETHER.get():
        together.first = True
    return square_sum(tree)


FEW = 2**16
"""The largest array, in elements, whose squares are copied next to others; a kernel of its own sums a larger one."""

ROW = 2**12
"""The number of elements that a GPU adds in one stage."""

MOST = 64
"""The number of large arrays that one kernel reads; XLA fuses no kernel with more than 96 operands and results."""


def _partial_sums(arrays: Sequence[jax.Array], together: _Together) -> Iterator[jax.Array]:
    """Yields vectors of partial sums, in float32 or wider, whose total is the sum of the squares of all arrays.

    An array of at most `FEW` elements gives its squares themselves.
    """
    large: dict[int, list[jax.Array]] = {}
    for array in arrays:
        if array.size <= FEW:
            yield _squares(array).reshape(-1)
        elif together.first:
            length = next(length for length in range(ROW, 0, -1) if array.size % length == 0)
            large.setdefault(length, []).append(_squares(array).reshape(-1, length))
        else:
            yield _sums_of_rows(array)
    for squares in large.values():
        for start in range(0, len(squares), MOST):
            # The barrier keeps XLA from joining this sum and the last one, which would take the arrays apart.
            yield jax.lax.optimization_barrier(jnp.sum(jnp.concatenate(squares[start : start + MOST]), axis=1))


def _sums_of_rows(x: jax.Array) -> jax.Array:
    """Sums the squares of a large array over its last axis, and over more axes while they have at most `ROW` elements.

    The sums are a vector. The kernel that computes them may also be the kernel that updates the array.
    """
    first = x.ndim - 1
    while math.prod(x.shape[first - 1 :]) <= ROW:
        first -= 1
    return jnp.sum(_squares(x), axis=tuple(range(first, x.ndim))).reshape(-1)


def _squares(x: jax.Array) -> jax.Array:
    x = x.astype(widest(x.dtype, FLOAT32))
    # Squares are never negative, so their sum is NaN only if a term is NaN.
    return jnp.where(jnp.isfinite(x), jnp.square(x), jnp.nan)


def all_finite(tree: Any) -> jax.Array:
    """True (a bool scalar array) if no floating or complex value in a tree is inf or NaN, or if there are none."""
    return ~jnp.isnan(_square_sum_first(tree))


def global_norm(tree: Any) -> Float[Array, ""]:
    """The Euclidean norm of all floating and complex values of a tree, in float32 or wider.

    It is inf (never NaN) if one of them is inf or NaN, or if the sum of their squares overflows; 0 without any.
    """
    return _root(square_sum(tree))


def _root(total: Float[Array, ""]) -> Float[Array, ""]:
    # A skipped step is not an error. Its norm is inf, not NaN, so that `jax_debug_nans` does not stop the program.
    return jnp.where(jnp.isnan(total), jnp.inf, jnp.sqrt(total))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clips like `optax.clip_by_global_norm`, but computes in the dtype of `global_norm`, float32 or wider.

    If the norm is below `max_norm`, gradients stay unchanged. Otherwise they are divided by the norm and multiplied by
    `max_norm`, and rounded once to their own dtypes. A step that also reports the norm, or skips by it, computes it
    only once.

    Pascanu et al., "On the difficulty of training recurrent neural networks", 2013 (arXiv:1211.5063), section 3.2.
    """

    def update(updates, state, params=None):
        del params
        norm = _root(_square_sum_first(updates))

        def clipped(g):
            # The norm of float16 gradients can be above 65,504, the largest float16.
            wide = widest(g.dtype, norm.dtype)
            scaled = g.astype(wide) / norm.astype(wide) * max_norm
            return jax.lax.select(jnp.squeeze(norm < max_norm), g, scaled.astype(g.dtype))

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
