"""An equation's primitive, applied to arrays of whatever floating dtype."""

from collections.abc import Sequence

import jax


# Not bound with their parameters, which hold the program of the combination in the dtype it was traced with.
_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def bind(primitive, arrays: Sequence, params: dict) -> Sequence[jax.Array]:
    """The results of a primitive for these arrays and parameters."""
    if primitive.name in _SCATTERS:
        operand, indices, updates = arrays
        kept = {name: params[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [_SCATTERS[primitive.name](operand, indices, updates, **kept)]
    outputs = primitive.bind(*arrays, **params)
    return outputs if primitive.multiple_results else [outputs]
