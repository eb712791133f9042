"""The sum of the squares of gradients, which says in one pass how large they are and whether all are finite.

Where a step asks for it several times (to skip a step, to report the norm, to clip), XLA computes it once: all ask by
the same operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.dtypes import FLOAT32, widest


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def square_sum(tree: Any) -> Float[Array, ""]:
    """Returns the sum of the squares of all floating and complex values, in float32 or wider.

    It is NaN if and only if one of the values is inf or NaN. It is inf if finite values are too large for it.

    >>> square_sum({"w": jnp.array([3.0, 4.0]), "b": jnp.float16(300)}), square_sum(jnp.float32("inf"))
    (Array(90025., dtype=float32), Array(nan, dtype=float32))
    """
    sums = [_of_leaf(leaf) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    dtype = widest(FLOAT32, *(each.dtype for each in sums))
    return sum((each.astype(dtype) for each in sums), jnp.zeros((), dtype))


def _of_leaf(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _of_leaf(x.real) + _of_leaf(x.imag)
    x = x.astype(widest(x.dtype, FLOAT32))
    # A sum of squares has no other way to become NaN: none of its terms is negative.
    return jnp.sum(jnp.where(jnp.isfinite(x), jnp.square(x), jnp.nan))


def all_finite(tree: Any) -> jax.Array:
    """Returns True (a bool scalar) if no floating or complex value is inf or NaN."""
    return ~jnp.isnan(square_sum(tree))


def global_norm(tree: Any) -> Float[Array, ""]:
    """Returns the Euclidean norm of all values, in float32 or wider; inf if one of them is not finite."""
    total = square_sum(tree)
    # A skipped step is no fault: nothing that leaves it is NaN, so that `jax_debug_nans` lets it pass.
    return jnp.where(jnp.isnan(total), jnp.inf, jnp.sqrt(total))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm`, with the norm computed in float32 or wider, in the same pass as all others.

    Pascanu et al., "On the difficulty of training recurrent neural networks", 2013 (arXiv:1211.5063), section 3.2.
    Gradients whose norm is not below `max_norm` are multiplied by `max_norm` over their norm.
    """

    def update(updates, state, params=None):
        del params
        norm = global_norm(updates)

        def clipped(g):
            return jax.lax.select(jnp.squeeze(norm < max_norm), g, (g / norm.astype(g.dtype)) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
