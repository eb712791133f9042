"""Which products of a traced program multiply by a weight, so that autocast runs them in float8."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.precision.float8.layers import SMALLEST_SIDE
from mpjax.precision.float8.products import Float8Dot
from mpjax.precision.float8.recipes import Recipe


def multiplies_a_weight(recipe: Recipe, primitive: str, operands: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Returns True for a product as of a linear layer: without batch axes, and large and even enough.

    Attention scores have batch axes. A product with a `precision` of the user's is left alone. The sides are those of
    the second operand, which is the weight in `x @ w` and in Flax, Equinox and Haiku.

    Args:
      recipe: the recipe.
      primitive: the name of the primitive.
      operands: the operands, cast to the compute dtype.
      params: the parameters of the primitive.
    """
    if primitive != "dot_general" or params.get("precision") is not None:
        return False
    (_, of_weight), batch = params["dimension_numbers"]
    if any(batch) or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands):
        return False
    weight = operands[1]
    inputs = 1
    for axis in of_weight:
        inputs *= weight.shape[axis]
    outputs = weight.size // inputs if inputs else 0
    return all(side >= SMALLEST_SIDE and side % recipe.multiple == 0 for side in (inputs, outputs))


def quantised_product(recipe: Recipe, operands: Sequence[Any], params: Mapping[str, Any]) -> jax.Array:
    """Applies a product of a traced program by a recipe."""
    x, w = operands
    dtype = params.get("preferred_element_type")
    return Float8Dot(recipe)(x, w, params["dimension_numbers"], preferred_element_type=dtype)
