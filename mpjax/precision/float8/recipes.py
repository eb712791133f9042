"""Recipes: how the operands of a float8 product are scaled, in which float8 dtypes, and which GPUs have units for it.

Formats: e4m3 (largest number 448) for activations and weights, e5m2 (57344) for incoming gradients, as in Micikevicius
et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433). Blocks: Open Compute Project, "Microscaling Formats
(MX) Specification", version 1.0, 2023.
"""

import dataclasses
import difflib
import importlib.metadata
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import normalised


E4M3 = np.dtype(jnp.float8_e4m3fn)
E5M2 = np.dtype(jnp.float8_e5m2)
E8M0 = np.dtype(jnp.float8_e8m0fnu)
"""Powers of two, the scales of MX blocks."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the operands of a product are quantised to float8.

    Attributes:
      name: the name in a policy's text.
      scaling: the numbers that share a scale. "tensor": a whole operand. "delayed": a whole operand, by the largest
        values of earlier steps. "row": each row along the contracted axis. "block": each 32 numbers along that axis.
      forward: the dtype of activations and weights.
      gradient: the dtype of incoming gradients.
      multiple: the number that must divide the numbers of inputs and outputs of a layer.
      capability: the lowest compute capability, `(major, minor)`, of an NVIDIA GPU with units for the recipe.
      history: the number of earlier steps that determine a delayed scale; 0 for the other scalings.
      aliases: other names, of torchao and TransformerEngine.
    """

    name: str
    scaling: Literal["tensor", "delayed", "row", "block"]
    forward: np.dtype = E4M3
    gradient: np.dtype = E5M2
    multiple: int = 16
    capability: tuple[int, int] = (8, 9)
    history: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name, followed by the aliases."""
        return self.name, *self.aliases

    def __str__(self) -> str:
        return self.name


FLOAT8 = Recipe("float8", "tensor", aliases=("fp8", "tensorwise", "Float8CurrentScaling"))
ROWWISE = Recipe("float8_rowwise", "row", aliases=("rowwise",))
DELAYED = Recipe("float8_delayed", "delayed", history=16, aliases=("delayed", "DelayedScaling"))
MXFP8 = Recipe(
    "mxfp8", "block", gradient=E4M3, multiple=32, capability=(10, 0), aliases=("MXFP8BlockScaling", "float8_block")
)

RECIPES = (FLOAT8, ROWWISE, DELAYED, MXFP8)


_BY_NAME = {normalised(name): recipe for recipe in RECIPES for name in recipe.names}


def find_recipe(spec: object) -> Recipe | None:
    """Finds the recipe that `spec` is, or whose name or alias it is; None for anything else.

    In names, case, spaces, `-` and `_` are ignored.
    """
    return spec if isinstance(spec, Recipe) else _BY_NAME.get(normalised(spec)) if isinstance(spec, str) else None


def as_recipe(spec: object) -> Recipe:
    """Converts `spec`, a recipe or its name, to a recipe.

    >>> as_recipe("tensorwise").name
    'float8'

    Raises:
      UsageError: no recipe has that name; the message lists the recipes and suggests the nearest.
    """
    if (recipe := find_recipe(spec)) is not None:
        return recipe
    near = difflib.get_close_matches(normalised(str(spec)), _BY_NAME, n=1)
    hint = f"; did you mean '{_BY_NAME[near[0]].name}'?" if near else ""
    raise UsageError(f"unknown recipe of products {spec!r}: wanted one of {', '.join(map(str, RECIPES))}{hint}")


def require_units(recipes: Iterable[Recipe], capability: tuple[int, int] | None, name: str) -> None:
    """Raises UsageError if a GPU has no units for the products of one of the recipes.

    Args:
      recipes: the recipes.
      capability: the GPU's compute capability, `(major, minor)`; None for other devices, which pass the check.
      name: the name of the GPU.

    Source: CUDA C++ Programming Guide, tensor cores by compute capability (e4m3 and e5m2 from 8.9, blocks from 10.0).
    """
    for recipe in recipes:
        if capability is not None and capability < recipe.capability:
            has, needs = (".".join(map(str, version)) for version in (capability, recipe.capability))
            instead = "mixed_float8" if capability >= FLOAT8.capability else "mixed_bfloat16"
            raise UsageError(
                f"{name} (compute capability {has}) has no units for {recipe}, which needs {needs}: "
                f"write --precision.policy {instead}"
            )


def require_undivided(recipes: Iterable[Recipe], tensor: int) -> None:
    """Raises UsageError if XLA would end the process when it compiles float8 products for a `tensor` group of devices.

    The largest number of an operand that is divided over `tensor` is a maximum over devices, which XLA does not
    compile: "Check failed: reduction_kind.has_value()" for GPUs, "Invalid binary instruction opcode copy" for CPUs
    (jaxlib 0.10.2 and 0.12.0.1). Recipes with scales of blocks have none.

    Args:
      recipes: the recipes.
      tensor: the number of devices in a `tensor` group.
    """
    aborting = sorted(str(recipe) for recipe in recipes if recipe.scaling != "block")
    if aborting and tensor > 1:
        raise UsageError(
            f"{', '.join(aborting)} over --mesh.tensor {tensor}: XLA's compiler ends the process (jaxlib "
            f"{importlib.metadata.version('jaxlib')}); divide over --mesh.fsdp instead, with --mesh.tensor 1, or write "
            "--precision.policy mixed_bfloat16"
        )


def emulated_reason(recipe: Recipe, platform: str) -> str | None:
    """Explains that JAX emulates a recipe's products on a CPU; None if `platform` is not "cpu"."""
    if platform != "cpu":
        return None
    return (
        f"a CPU emulates {recipe}: it rounds the operands of products to float8 and multiplies them in float32; "
        "results are right, but no faster than with --precision.policy float32"
    )


def capability_of(device: Any) -> tuple[int, int] | None:
    """The compute capability, `(major, minor)`, of a `jax.Device` that is an NVIDIA GPU; None for other devices."""
    try:
        major, _, minor = str(device.compute_capability).partition(".")
        return int(major), int(minor or 0)
    except (AttributeError, ValueError):  # on AMD it is a name, "gfx942"
        return None
