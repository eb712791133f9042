"""The products of a traced program that autocast runs in float8: products with a weight of large, divisible sides.

The outcome of each product that a policy asks for in float8 is noted, so that autocast can report if none is.
"""

import collections
import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpjax.precision.float8.layers import SMALLEST_SIDE
from mpjax.precision.float8.products import Float8Dot
from mpjax.precision.float8.recipes import Recipe


def why_not_quantised(
    recipe: Recipe, operands: Sequence[Any], params: Mapping[str, Any], weight: int | None
) -> str | None:
    """Explains why autocast does not run a product in float8; None if it does.

    The text follows a number of products in a message, as in "3 with batch axes, as attention has". The reasons are
    batch axes, operands that are not floating, a `precision` of the user's, and numbers of inputs or outputs below
    `SMALLEST_SIDE` or not multiples of `recipe.multiple`. The setting `jax_default_matmul_precision` does not count as
    a precision of the user's: layers under `apply_policy` ignore it too.

    Args:
      recipe: the recipe.
      operands: the operands of `dot_general`, cast to the compute dtype.
      params: the parameters of the `dot_general` equation.
      weight: the index of the weight, 0 or 1; None if it is not known. Then the batch too, like the inputs and
        outputs, must be at least `SMALLEST_SIDE` and a multiple of `recipe.multiple`.
    """
    of, batch = params["dimension_numbers"]
    if any(batch):
        return "with batch axes, as attention has"
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands):
        return "of integers"
    if _has_own_precision(params.get("precision")):
        return "with a precision of their own"
    sides = [math.prod(operands[0].shape[axis] for axis in of[0])]
    sides += [_others(operands[index], of[index]) for index in ((0, 1) if weight is None else (weight,))]
    if all(side >= SMALLEST_SIDE and side % recipe.multiple == 0 for side in sides):
        return None
    unknown = " (of a batch too, as it is not known which operand is the weight)" if weight is None else ""
    return f"with a side below {SMALLEST_SIDE} or that is no multiple of {recipe.multiple}{unknown}"


def _has_own_precision(precision: Any) -> bool:
    if precision is None:
        return False
    setting: Any = getattr(jax.config, "jax_default_matmul_precision", None)
    default = {lax.Precision.DEFAULT}
    if setting in {member.name.lower() for member in lax.Precision} | {"bfloat16", "tensorfloat32", "float32"}:
        default.add(lax.Precision(setting))
    return not (isinstance(precision, tuple) and set(precision) <= default)


def _others(x: Any, axes: Sequence[int]) -> int:
    return math.prod(size for axis, size in enumerate(x.shape) if axis not in axes)


def quantised_product(
    recipe: Recipe, operands: Sequence[Any], params: Mapping[str, Any], weight: int | None
) -> jax.Array:
    """Multiplies the operands of a traced `dot_general` in float8; takes the arguments of `why_not_quantised`.

    The first operand counts as the activations unless `weight` is 0. The result has the axes and the
    `preferred_element_type` of the traced product.
    """
    dtype, numbers = params.get("preferred_element_type"), params["dimension_numbers"]
    if weight != 0:
        return Float8Dot(recipe)(operands[0], operands[1], numbers, preferred_element_type=dtype)
    # `weight @ x`: the second operand holds the rows of activations.
    (of_weight, of_x), batch = numbers
    w, x = operands
    y = Float8Dot(recipe)(x, w, ((of_x, of_weight), batch), preferred_element_type=dtype)
    kept = x.ndim - len(of_x)
    return jnp.transpose(y, (*range(kept, y.ndim), *range(kept)))


IN_FLOAT8 = "in float8"

TAKEN_OUT = "kept out of float8 by rules"

_NOTED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("products", default=None)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Context that yields an empty list, to which `note` adds the outcomes of products inside the `with` block.

    The outcome of a product is `IN_FLOAT8`, or the reason why it is not in float8, such as `TAKEN_OUT`. Of nested
    blocks, only the innermost gets the outcomes.
    """
    products: list[str] = []
    token = _NOTED.set(products)
    try:
        yield products
    finally:
        _NOTED.reset(token)


def note(products: Iterable[str]) -> None:
    """Adds the outcomes of products to the list of the innermost open `noted` block; does nothing outside."""
    if (notes := _NOTED.get()) is not None:
        notes.extend(products)


def nothing_in_float8(recipes: Iterable[Recipe], products: Iterable[str]) -> str:
    """Explains that no product of a function is in float8, with the reasons, and advises a policy.

    Args:
      recipes: the recipes that the policy asks for.
      products: the reasons that were noted.
    """
    reasons = [f"{count} {reason}" for reason, count in collections.Counter(products).most_common()]
    return (
        f"autocast: no product of the function is in float8, which the policy asks for "
        f"({', '.join(sorted(map(str, recipes)))}). Its products: {'; '.join(reasons) or 'none'}. Write mixed_bfloat16 "
        "if this is as it should be"
    )
