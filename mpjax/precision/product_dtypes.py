"""The dtypes and float8 recipes that a policy requires of the matrix products and convolutions in each module."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.calls import modules_of
from mpjax.precision.float8.layers import SMALLEST_SIDE, is_linear, is_quantised, reason_not_in_float8, sides
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.heads import layer_tags
from mpjax.precision.layers import CONVOLUTION
from mpjax.precision.module_tree import class_names, second_names
from mpjax.precision.modules import rules_for_modules
from mpjax.precision.policy import Policy
from mpjax.precision.rules import DEFAULTS, Lineage, decide, is_default, scope_lineage, winner


class AskedDtypes(NamedTuple):
    """The dtypes that a policy requires of the matrix products and convolutions in a module.

    Attributes:
      compute: the dtype of products, also of products that a recipe leaves alone, such as attention scores.
      recipe: the recipe of float8 products, or None.
      required: True if every product must follow the recipe: the layer is linear, and its numbers of inputs and outputs
        are at least 64 and multiples of the recipe's `multiple`.
      refused: True if no product may be in float8: the layer is linear, and the policy has no recipe for it, or its
        numbers of inputs and outputs do not allow the recipe.
      applied: the recipe that the layer multiplies with now; None if it does not multiply in float8, or is not known.
      users_product: True for a layer whose product is a function of the user's, which no policy changes.
      unknown: True if no modules are known, or modules of several models have the path and differ. A recipe is then
        allowed, and not required.
    """

    compute: np.dtype
    recipe: Recipe | None = None
    required: bool = False
    refused: bool = False
    applied: Recipe | None = None
    users_product: bool = False
    unknown: bool = False

    @property
    def accepted(self) -> frozenset[np.dtype]:
        """The dtypes that products may have.

        Without a recipe it is `compute` alone. With a recipe the recipe's two float8 dtypes are added, and replace
        `compute` if `required`.
        """
        if self.recipe is None:
            return frozenset({self.compute})
        float8 = {self.recipe.forward, self.recipe.gradient}
        return frozenset(float8 if self.required else {self.compute, *float8})


class PolicyForModules:
    """A function from a module path to the `AskedDtypes` of a policy, with checks of the policy's rules.

    Args:
      policy: the policy; None if nothing is required.
      modules: the models (NNX modules) in which paths are looked up, by any key; rules may name the classes of their
        submodules. Without models, paths are named scopes of an unknown type.
    """

    def __init__(self, policy: Policy | None, modules: Mapping[Any, Any]):
        self._policy = policy
        self._models = [_Model.of(model) for model in modules.values()]
        self._rules = None if policy is None else rules_for_modules(policy)

    def __call__(self, path: str) -> AskedDtypes | None:
        """Finds the dtypes that the policy requires of products in the module at `path`.

        If several models have the path and differ, the answer is `unknown`, or None if their compute dtypes or their
        recipes differ. A path that no model has is decided by the rules for the paths around it. The answer is also
        None without a policy.
        """
        models = [model for model in self._models if path in model.held] or self._models or [_Model({}, {})]
        answers = {answer for model in models if (answer := self._asked(path, model))}
        if len(answers) == 1:
            return answers.pop()
        computes = {answer.compute for answer in answers}
        recipes = {answer.recipe for answer in answers if answer.recipe}
        if len(computes) != 1 or len(recipes) > 1:
            return None
        users_product = any(answer.users_product for answer in answers)
        return AskedDtypes(computes.pop(), next(iter(recipes), None), users_product=users_product, unknown=True)

    def _asked(self, path: str, model: "_Model") -> AskedDtypes | None:
        policy, module = self._policy, model.held.get(path)
        if policy is None or self._rules is None:
            return None
        pattern = winner(self._rules, model.lineage(path))
        value = None if pattern is None else self._rules[pattern]
        compute, recipe = policy.computes(value), policy.multiplies(value)
        if module is None or not is_linear(module):
            return AskedDtypes(compute, recipe, users_product=_has_own_product(module), unknown=not self._models)
        applied = module.dot_general.recipe if is_quantised(module) else None
        if recipe is None or reason_not_in_float8(module, recipe):
            return AskedDtypes(compute, refused=True, applied=applied)
        return AskedDtypes(compute, recipe, required=min(sides(module)) >= SMALLEST_SIDE, applied=applied)

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        """The dtypes that the policy and its rules name, without the dtypes of recipes."""
        if self._policy is None or self._rules is None:
            return frozenset()
        return dataclasses.replace(self._policy, rules=self._rules).dtypes

    def awaited(self, paths: Iterable[str]) -> Recipe | None:
        """Finds a float8 recipe that at least one product must follow; None if all products may be wider.

        With known models, it is the first recipe that a linear layer must or may follow. If no linear layer has one, it
        is the policy's own recipe, or None if a rule of the user decides a linear layer. Without models, it is the
        first recipe of a product at one of `paths`. It is None without a policy.

        Args:
          paths: the module paths of the products that the policy applies to.
        """
        if self._policy is None or self._rules is None:
            return None
        linear = [(path, model) for model in self._models for path, module in model.held.items() if is_linear(module)]
        requested = (self._asked(*layer) for layer in linear) if self._models else map(self, [*paths] or [""])
        if recipe := next((dtypes.recipe for dtypes in requested if dtypes and dtypes.recipe), None):
            return recipe
        deciding = {winner(self._rules, model.lineage(path)) for path, model in linear}
        return self._policy.products if self._models and deciding <= {None, *DEFAULTS} else None

    def require_rules(self, scopes: Iterable[str] | None) -> None:
        """Raises UsageError if a rule decides neither a module nor a named scope of the traced program.

        Without models, also raises it for a `type:` rule. Rules of `DEFAULTS` are not checked, and without a policy
        there is nothing to check.

        Args:
          scopes: the named scopes; None if the program was not traced: then only `type:` rules are checked.
        """
        if self._policy is None or self._rules is None:
            return
        typed = [rule for rule in self._policy.rules if rule.startswith("type:") and not is_default(rule)]
        if typed and not self._models:
            raise UsageError(
                f"rule '{typed[0]}' names a class, and no Flax NNX module is known here: give the function and the "
                "model as its argument, or name the module by its path"
            )
        if scopes is not None:
            outer = {path for scope in scopes for path, _ in scope_lineage(scope)}
            models = self._models or [_Model({}, {})]
            lineages = [model.lineage(path) for model in models for path in sorted({*model.held, *outer})]
            again = (second_names(model.held) for model in self._models)
            decide(self._rules, lineages, {path: first for names in again for path, first in names.items()})


class _Model(NamedTuple):
    """The submodules of a model by path (`held`), and the names of their classes and tags by path (`types`)."""

    held: dict[str, Any]
    types: dict[str, frozenset[str]]

    @classmethod
    def of(cls, model: Any) -> "_Model":
        held = modules_of(model)
        tags, none = layer_tags(held), frozenset()
        return cls(held, {path: frozenset(class_names(module)) | tags.get(path, none) for path, module in held.items()})

    def lineage(self, path: str) -> Lineage:
        return tuple((name, self.types.get(name, none)) for name, none in scope_lineage(path))


def _has_own_product(module: Any) -> bool:
    """True for a Flax linear layer or convolution whose product is the user's own, which no policy changes."""
    if module is None:
        return False
    from flax import nnx

    if isinstance(module, nnx.Conv):
        return module.conv_general_dilated not in (jax.lax.conv_general_dilated, CONVOLUTION)
    if isinstance(module, nnx.Einsum):
        return getattr(module, "einsum_op", jnp.einsum) is not jnp.einsum
    return isinstance(module, nnx.Linear | nnx.LinearGeneral) and not is_linear(module)
