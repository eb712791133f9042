"""Notes the outcome of each product that a policy asks for in float8, so that autocast can report if none is."""

import collections
import contextlib
import contextvars
from collections.abc import Iterable, Iterator

from mpjax.precision.float8.recipes import Recipe


IN_FLOAT8 = "in float8"

TAKEN_OUT = "kept out of float8 by rules"

_NOTED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("products", default=None)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Context that yields a list, to which `note` adds inside the `with` block.

    The list has an outcome for each product: `IN_FLOAT8`, or the reason why it is not, such as `TAKEN_OUT`.
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
