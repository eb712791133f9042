"""Notes what became of the products that a policy asks for in float8, so that autocast says if none is."""

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
    """Returns a list that is filled while open: for each product, `IN_FLOAT8`, or why it is not, as `TAKEN_OUT`."""
    products: list[str] = []
    token = _NOTED.set(products)
    try:
        yield products
    finally:
        _NOTED.reset(token)


def note(products: Iterable[str]) -> None:
    """Adds what became of products to the innermost open list."""
    if (found := _NOTED.get()) is not None:
        found.extend(products)


def nothing_in_float8(recipes: Iterable[Recipe], products: Iterable[str]) -> str:
    """Says that no product of a function is in float8, why, and what to write.

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
