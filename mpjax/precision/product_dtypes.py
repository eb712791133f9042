"""What a policy asks of the products in each module: a dtype, and a recipe where layers multiply in float8."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpjax.precision.calls import modules_of
from mpjax.precision.float8.layers import SMALLEST_SIDE, is_linear, sides, tags_of, why_wide
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.module_tree import class_names
from mpjax.precision.modules import rules_for_modules
from mpjax.precision.policy import Policy
from mpjax.precision.rules import scope_lineage, winner


class AskedDtypes(NamedTuple):
    """What products in a module are asked to be in.

    Attributes:
      compute: the dtype of products, and of those that a recipe leaves alone, as attention scores.
      recipe: the recipe of float8 products; None for none.
      required: True if every product is to be by the recipe: those of a linear layer that is large and even enough.
      refused: True if no product is to be in float8: those of a linear layer without a recipe.
    """

    compute: np.dtype
    recipe: Recipe | None = None
    required: bool = False
    refused: bool = False

    @property
    def accepted(self) -> frozenset[np.dtype]:
        """Returns the dtypes that products may be in."""
        if self.recipe is None:
            return frozenset({self.compute})
        float8 = {self.recipe.forward, self.recipe.gradient}
        return frozenset(float8 if self.required else {self.compute, *float8})


def asked_dtypes(policy: Policy | None, modules: Mapping[Any, Any]) -> Callable[[str], AskedDtypes | None]:
    """Returns a function from module path to what the policy asks for there; it returns None if no policy was given.

    Args:
      policy: the policy.
      modules: the NNX modules whose classes the rules may name, by any key.
    """
    held = {path: module for one in modules.values() for path, module in modules_of(one).items()}
    tags = tags_of(held) if held else {}
    types = {path: frozenset(class_names(module)) | tags.get(path, frozenset()) for path, module in held.items()}
    rules = None if policy is None else rules_for_modules(policy)

    def of(path: str) -> AskedDtypes | None:
        if policy is None or rules is None:
            return None
        pattern = winner(rules, tuple((name, types.get(name, none)) for name, none in scope_lineage(path)))
        value = None if pattern is None else rules[pattern]
        compute, recipe, module = policy.computes(value), policy.multiplies(value), held.get(path)
        if module is None or not is_linear(module):
            return AskedDtypes(compute, recipe)
        if recipe is None or why_wide(module, recipe):
            return AskedDtypes(compute, refused=True)
        return AskedDtypes(compute, recipe, required=min(sides(module)) >= SMALLEST_SIDE)

    return of
