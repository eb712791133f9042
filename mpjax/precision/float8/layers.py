"""Which layers of a Flax NNX model multiply in float8, by which tags rules exclude them, and how it is switched on."""

import dataclasses
import dis
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from mpjax.precision.calls import owner_of_call
from mpjax.precision.float8.history import keep_history
from mpjax.precision.float8.matrices import Largest
from mpjax.precision.float8.products import Float8Dot
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.float8.scaling import largest_of_parts
from mpjax.precision.layers import DOT_GENERAL, changed
from mpjax.precision.module_tree import is_item, with_lists
from mpjax.precision.rules import FIRST_OR_LAST, LINEAR, SMALL_PRODUCT


SMALLEST_SIDE = 64
"""The smallest number of inputs and outputs of a layer that gains from float8; below it, quantising costs more."""

_MULTIPLE = 16


def is_linear(module: Any) -> bool:
    """True for an `nnx.Linear` or `nnx.LinearGeneral` whose product is Flax's own, or float8 by `set_products`.

    False with a `dot_general` or a `precision` of the user's, or with batch axes (a kernel for each example). Also
    False for a subclass whose own `__call__` multiplies by itself, and for other modules.
    """
    from flax import nnx

    if not isinstance(module, nnx.Linear | nnx.LinearGeneral) or module.precision is not None:
        return False
    if not _leaves_the_product_to_flax(type(module)):
        return False
    if getattr(module, "dot_general_cls", None) is not None or getattr(module, "batch_axis", None):
        return False
    return module.dot_general in (None, jax.lax.dot_general, DOT_GENERAL) or is_quantised(module)


def _leaves_the_product_to_flax(cls: type) -> bool:
    """True if a layer's `__call__` is Flax's, calls another `__call__`, as by `super()`, or reads `self.dot_general`.

    Methods that it calls are not searched.
    """
    owner: Any = owner_of_call(cls)
    if owner is None or owner.__module__.startswith("flax."):
        return owner is not None
    code = getattr(inspect.unwrap(owner.__call__), "__code__", None)
    return isinstance(code, types.CodeType) and _reads_product(code, code.co_varnames[0])


def _reads_product(code: types.CodeType, layer: str) -> bool:
    """True if a function, or one inside it, reads the `dot_general` of the variable `layer` or any `__call__`."""
    if "__call__" in code.co_names:
        return True
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    if any(_reads_product(function, layer) for function in inner):
        return True
    # `jax.lax.dot_general` is an attribute too, but of a module.
    return any(
        attribute.argval == "dot_general" and layer == _last_loaded(holder)
        for holder, attribute in itertools.pairwise(dis.get_instructions(code))
    )


def _last_loaded(instruction: dis.Instruction) -> Any:
    """The name of the variable that an instruction loads, or of the second one if it loads two."""
    return instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval


def sides(module: Any) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer; several input or output axes are multiplied."""
    inputs, outputs = (
        math.prod(size) if isinstance(size, Iterable) else size for size in (module.in_features, module.out_features)
    )
    return inputs, outputs


def tags_of(modules: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Tags layers by module path. Rules match tags as `type:`, like the names of classes.

    `linear_layer`: layers that can multiply in float8. `first_or_last`: linear layers and embeddings outside all lists,
    such as a head, and the first and last layer of a list. Consecutively numbered attributes (`layer1`, `layer2`,
    `layer3`) count as a list. `small_product`: linear layers whose number of inputs or outputs is below 64 or not a
    multiple of 16. Only linear layers and embeddings are in the result, also with an empty set of tags.

    Args:
      modules: the modules of a model by path.
    """
    from flax import nnx

    tags: dict[str, frozenset[str]] = {}
    listed = with_lists(modules)
    by_place = {listed[path]: module for path, module in modules.items()}
    for path, module in modules.items():
        linear = is_linear(module)
        if not (linear or isinstance(module, nnx.Embed)):
            continue
        module_tags = {LINEAR} if linear else set()
        if _is_first_or_last(listed[path], by_place):
            module_tags.add(FIRST_OR_LAST.removeprefix("type:"))
        if linear and any(side < SMALLEST_SIDE or side % _MULTIPLE for side in sides(module)):
            module_tags.add(SMALL_PRODUCT.removeprefix("type:"))
        tags[path] = frozenset(module_tags)
    return tags


def _is_first_or_last(path: str, modules: Mapping[str, Any]) -> bool:
    parts = path.split("/")
    if not any(map(is_item, parts)):
        return True
    outer = "/".join(parts[:-1])
    if not parts[-1].isdecimal() or any(map(is_item, parts[:-1])):
        return False
    beside = [other.rpartition("/") for other, module in modules.items() if _has_weight(module)]
    numbers = [int(name) for holder, _, name in beside if holder == outer and name.isdecimal()]
    return int(parts[-1]) in (min(numbers), max(numbers))


def _has_weight(module: Any) -> bool:
    from flax import nnx

    return isinstance(module, nnx.Linear | nnx.LinearGeneral | nnx.Conv | nnx.ConvTranspose | nnx.Einsum | nnx.Embed)


def is_quantised(module: Any) -> bool:
    """True if `set_products` made a module multiply in float8."""
    return isinstance(getattr(module, "dot_general", None), Float8Dot)


def scaled_by_largest_of(
    layer: Any, *, activations: Callable[[], jax.Array] | None = None, weight: jax.Array | None = None
) -> Any:
    """Copies a float8 layer for one call, with the scale of an operand taken from another array than the operand.

    Only layers with one scale for each operand (`scales_whole_operands`) are copied; others are returned as they are.
    An operand whose argument is None keeps the scale from its own values.

    Args:
      layer: a layer.
      activations: computes the values that the layer is called with, a second time. On a GPU it takes fewer bytes to
        compute cheap activations twice than to write them in half precision and read them again.
      weight: an array that the layer's weight is a part of, whose largest value scales the weight.
    """
    if not scales_whole_operands(layer):
        return layer
    largest = Largest(
        None if activations is None else largest_of_parts(jax.lax.stop_gradient(activations())),
        None if weight is None else largest_of_parts(jax.lax.stop_gradient(weight)),
    )
    return changed(layer, dot_general=dataclasses.replace(layer.dot_general, largest=largest))


def scales_whole_operands(layer: Any) -> bool:
    """True if a layer multiplies in float8 with one scale for each whole operand, from its present values."""
    recipe = recipe_of(layer)
    return recipe is not None and recipe.scaling == "tensor"


def recipe_of(module: Any) -> Recipe | None:
    """The recipe that `set_products` gave to a module, or None."""
    return module.dot_general.recipe if is_quantised(module) else None


def set_products(module: Any, recipe: Recipe | None) -> bool:
    """Makes a linear layer multiply in float8 with a recipe, in place; other modules stay unchanged.

    If `recipe` is None, or does not allow the sides of the layer's weight, a layer that multiplies in float8 gets
    Flax's product back and loses its history.

    Returns:
      True if the layer now multiplies in float8.
    """
    if recipe is not None and is_linear(module) and reason_not_in_float8(module, recipe) is None:
        module.dot_general = Float8Dot(recipe)
        keep_history(module, recipe if recipe.history else None)
        return True
    if is_quantised(module):
        keep_history(module, None)
        module.dot_general = default_product(module)
    return False


def default_product(module: Any) -> Any:
    """The `dot_general` that Flax gives a layer by default; depends on whether it is a `Linear` or `LinearGeneral`."""
    from flax import nnx

    flax_class = nnx.Linear if isinstance(module, nnx.Linear) else nnx.LinearGeneral
    return inspect.signature(flax_class.__init__).parameters["dot_general"].default


def reason_not_in_float8(module: Any, recipe: Recipe | None) -> str | None:
    """Explains why a linear layer cannot use a float8 recipe: inputs or outputs are no multiple of `recipe.multiple`.

    None if both are multiples. Also None without a recipe, and for a module that `is_linear` rejects, such as an
    `nnx.Linear` with a `precision`.
    """
    if recipe is None or not is_linear(module):
        return None
    inputs, outputs = sides(module)
    uneven = [str(side) for side in dict.fromkeys((inputs, outputs)) if side % recipe.multiple]
    if not uneven:
        return None
    which = f"{uneven[0]} is no multiple" if len(uneven) == 1 else f"{' and '.join(uneven)} are no multiples"
    return f"its weight is {inputs} x {outputs}, and {which} of {recipe.multiple}, which {recipe} needs"


def not_covered(rules: Iterable[str], modules: Mapping[str, Any], tags: Mapping[str, frozenset[str]]) -> list[str]:
    """Explains that a rule for `type:Linear` does not cover the `LinearGeneral` layers of a model, as attention has.

    The list has one note, or is empty if there is no such rule or no such layer.

    Args:
      rules: the patterns of the policy.
      modules: the modules of a model by path.
      tags: the tags of layers, by path.
    """
    from flax import nnx

    others = [
        path
        for path, module_tags in tags.items()
        if LINEAR in module_tags and not isinstance(modules[path], nnx.Linear)
    ]
    if "type:Linear" not in rules or not others:
        return []
    shown = f"{', '.join(others[:3])}{', ...' if others[3:] else ''}"
    return [f"rule 'type:Linear' does not cover LinearGeneral ({shown}): 'type:{LINEAR}' covers all linear layers"]


def stacked_not_covered(modules: Mapping[str, Any]) -> list[str]:
    """Explains, in a list of at most one note, that products of the stacked kernels of experts are not in float8."""
    paths = [path for path, module in modules.items() if getattr(type(module), "stacked_kernels", ())]
    if not paths:
        return []
    shown = f"{', '.join(paths[:3])}{', ...' if paths[3:] else ''}"
    dtype = modules[paths[0]].dtype
    return [f"{shown} multiply in {dtype}, not in float8: products with the stacked kernels of experts have no scales"]


def nothing_quantised(recipe: Recipe, decided: Mapping[str, str | None], tags: Mapping[str, frozenset[str]]) -> str:
    """Explains why no layer of a model multiplies in float8: it has no linear layer, or rules or sides exclude all.

    Args:
      recipe: the recipe.
      decided: the pattern that decides each module, by path; None for a module that no pattern matches.
      tags: the tags of layers, by path.
    """
    linear = [path or "the model itself" for path, module_tags in tags.items() if LINEAR in module_tags]
    if not linear:
        return f"products={recipe}: the model has no linear layer, and nothing else multiplies in float8"
    rules = sorted({decided[path] or "their sides" for path, module_tags in tags.items() if LINEAR in module_tags})
    why = [reason for rule, reason in _WHY_WIDE.items() if rule in rules]
    return (
        f"products={recipe}: no layer multiplies in float8: {', '.join(rules)} decided all {len(linear)} linear layers "
        f"({', '.join(linear[:3])}{', ...' if linear[3:] else ''}){'; '.join(['', *why])}. Write a rule for those that "
        f"are to, as in --precision.rules type:{LINEAR} {recipe}, in Python rules={{'type:{LINEAR}': '{recipe}'}}, or "
        "mixed_bfloat16"
    )


_WHY_WIDE = {
    FIRST_OR_LAST: "a layer in no list, as a stem or a head, stays wide, and so do the first and the last of a list of "
    "layers, so that a list of two has no inner one",
    SMALL_PRODUCT: f"a side below {SMALLEST_SIDE}, or that is no multiple of {_MULTIPLE}, costs more than it saves",
}
"""Reasons why the rules of presets keep layers out of float8."""
