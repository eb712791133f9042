"""Low-rank adapters of linear layers: LoRA (Hu et al., 2021, arXiv:2106.09685), rsLoRA and DoRA.

A layer with a frozen weight W [in, out] computes with W + s A B, where A [in, r] and B [r, out] are trained. B begins
as zeros, so that the first step computes what the layer computed before. rsLoRA (arXiv:2312.03732) divides by the root
of r in s. DoRA (arXiv:2402.09353) also trains the norm of each column of the weight.
"""

from __future__ import annotations

import difflib
import functools
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.errors import UsageError
from mpjax.models.adapters import (
    WRAPPERS,
    Adapter,
    adapted_layers,
    adapter_of,
    is_adapted,
    matrix_of,
    norms_of,
    stack_of_layer,
)
from mpjax.models.quantised import dtype_of_kernel, restore
from mpjax.models.scan import names_apart, one_by_one, stacks_of
from mpjax.precision.calls import modules_of, owner_of_call, unwrap, wrap
from mpjax.precision.dtypes import FLOAT32, as_dtype, widest
from mpjax.precision.float8.layers import sides
from mpjax.precision.heads import layer_tags
from mpjax.precision.module_tree import lineages_of
from mpjax.precision.rules import covers


Variant = Literal["lora", "rslora", "dora"]

FLAG = "--training.lora"


def add_lora(
    model: nnx.Module,
    patterns: Iterable[str],
    *,
    rank: int = 16,
    alpha: float = 16.0,
    variant: Variant = "lora",
    rngs: nnx.Rngs,
) -> list[str]:
    """Adds adapters to the linear layers of `model` that patterns cover, in place. Weights and outputs do not change.

    A layer gets `lora_a` [in, r], uniform up to 1 / sqrt(in), and `lora_b` [r, out], zeros; for DoRA also `magnitude`
    [out], the norms of the columns of its weight. Several axes of inputs or outputs count as one. All are variables of
    the class `Adapter`. A loop of your own trains them alone by `nnx.Optimizer(model, tx, wrt=Adapter)` and
    `nnx.grad(loss, argnums=nnx.DiffState(0, Adapter))`.

    Args:
      model: an NNX module with its weights, or an abstract one from `nnx.eval_shape`.
      patterns: globs on the paths of `nnx.Linear` and `nnx.LinearGeneral` layers or of modules around them, or `type:`
        and a class, as in the rules of a policy.
      rank: r.
      alpha: A B is multiplied by `alpha` / r; for rsLoRA by `alpha` / sqrt(r).
      variant: "lora", "rslora" or "dora".
      rngs: the random streams for initial values; `params` is drawn from once.

    Returns:
      The paths of the layers; the blocks of a stack (`scan_blocks`) have one, with `all` in place of their number.

    Raises:
      UsageError: a setting is out of range; a pattern matches no linear layer, or only some blocks of a stack; or a
        layer has adapters already, a weight for each example, or a `__call__` of its own, which may multiply otherwise.
    """
    if rank < 1 or not 0 < alpha < math.inf:
        raise UsageError(f"rank {rank}, alpha {alpha}: wanted a rank of at least 1 and a positive alpha")
    if variant not in WRAPPERS:
        raise UsageError(f"unknown variant '{variant}': wanted {', '.join(WRAPPERS)}")
    layers, stacks, key = lora_layers(model, patterns), stacks_of(model), rngs.params()
    for path, layer in layers.items():
        keys = [jax.random.fold_in(key, zlib.crc32(name.encode())) for name in names_apart(f"{path}/", stacks)]
        stack, (inputs, outputs) = stack_of_layer(layer), sides(layer)
        layer.lora_a = _made(layer, (*stack, inputs, rank), functools.partial(_uniform, keys))
        layer.lora_b = _made(layer, (*stack, rank, outputs), jnp.zeros)
        if variant == "dora":
            layer.magnitude = _made(layer, (*stack, outputs), lambda shape, layer=layer: norms_of(matrix_of(layer)))
        wrap(layer, WRAPPERS[variant](alpha))
    return list(layers)


def _made(layer: Any, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], jax.Array]) -> Adapter:
    """The variable with the array that `make` returns, at least float32; with the shape alone in an abstract model."""
    dtype = widest(dtype_of_kernel(layer), FLOAT32)
    if isinstance(layer.kernel.get_value(), jax.ShapeDtypeStruct):
        return Adapter(jax.ShapeDtypeStruct(shape, dtype))
    return Adapter(make(shape).astype(dtype))


def _uniform(keys: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Draws uniform numbers up to 1 / sqrt(in), [*S, in, r], with a key for each block of a stack."""
    bound = 1 / math.sqrt(shape[-2])
    rows = [jax.random.uniform(key, shape[-2:], FLOAT32, -bound, bound) for key in keys]
    return jnp.stack(rows).reshape(shape)


# The layers that patterns cover


def lora_layers(model: nnx.Module, patterns: Iterable[str]) -> dict[str, Any]:
    """Finds the layers of `add_lora` by path.

    Raises:
      UsageError: as `add_lora`.
    """
    patterns = tuple(patterns) if not isinstance(patterns, str) else (patterns,)
    if not patterns:
        raise UsageError(f"{FLAG}: no pattern, so no layer would have an adapter; wanted one or more")
    modules, stacks = modules_of(model), stacks_of(model)
    single = modules_of(one_by_one(model))
    lineages = {lineage[-1][0]: lineage for lineage in lineages_of(single, layer_tags(single))}
    matching = {
        path: next((pattern for pattern in patterns if covers(pattern, lineage)), None)
        for path, lineage in lineages.items()
        if _is_linear(single[path])
    }
    for pattern in patterns:
        if not any(covers(pattern, lineages[path]) for path in matching):
            raise UsageError(_why_none(pattern, lineages, single, matching))
    layers = {}
    for path, module in modules.items():
        block_names = [name.removesuffix("/") for name in names_apart(f"{path}/", stacks)]
        covered = [row for row in block_names if matching.get(row)]
        if covered and len(covered) < len(block_names):
            raise UsageError(
                f"{FLAG} '{matching[covered[0]]}' is for some of the {len(block_names)} blocks that {path} holds, and "
                "with scan_blocks they are one array: write --model.no_scan_blocks, or a pattern for all blocks"
            )
        if covered:
            _require_known_product(path, module)
            layers[path] = module
    return layers


def _is_linear(module: Any) -> bool:
    return isinstance(module, nnx.Linear | nnx.LinearGeneral)


def has_known_product(layer: Any) -> bool:
    """True for an `nnx.Linear` or `nnx.LinearGeneral` that computes x W + b with its kernel W, for all examples."""
    return owner_of_call(type(layer)) in (nnx.Linear, nnx.LinearGeneral) and not getattr(layer, "batch_axis", None)


def _require_known_product(path: str, layer: Any) -> None:
    """Raises UsageError if a layer has an adapter, or computes, or may compute, something else than x W + b."""
    name = f"{path or 'the model'} ({type(layer).__name__})"
    if is_adapted(layer):
        raise UsageError(f"{FLAG}: {name} has an adapter already: add adapters once, or merge them before")
    if getattr(layer, "batch_axis", None):
        raise UsageError(f"{FLAG}: {name} has a weight for each example (batch_axis): leave it out of the patterns")
    if not has_known_product(layer):
        raise UsageError(
            f"{FLAG}: {name} has a __call__ of its own, so what it computes with its kernel is not known: leave it out "
            "of the patterns, or make it of an nnx.Linear"
        )


def _why_none(pattern: str, lineages: dict, modules: dict, linear: Iterable[str]) -> str:
    """Explains that a pattern covers no linear layer, with the nearest paths of such layers."""
    known = sorted(path for path in linear if path)
    if not known:
        return (
            f"{FLAG} '{pattern}': the model has no nnx.Linear and no nnx.LinearGeneral, and no other layer is adapted"
        )
    others = [path for path, lineage in lineages.items() if path and covers(pattern, lineage)]
    around = {"/".join(path.split("/")[:depth]) for path in known for depth in range(1, path.count("/") + 1)}
    near = difflib.get_close_matches(pattern, sorted({*known, *around}), n=3, cutoff=0.4) or known[:3]
    what = f"no linear layer, only {others[0]} ({type(modules[others[0]]).__name__})" if others else "nothing"
    return f"{FLAG} '{pattern}' matches {what}; linear layers near it: {', '.join(near)}"


# Adapters into weights


def merge_lora(model: nnx.Module, *, dtype: Any = None) -> None:
    """Replaces each adapted layer's weight by the one that it stands for, and removes the adapters, in place.

    The weight is computed in float32 and rounded once. Quantised layers get weights again.

    Args:
      model: the model, with arrays.
      dtype: the dtype of these weights; None: that of the weight before, float32 in place of a quantised one.

    Raises:
      UsageError: a weight overflows in the dtype.
    """
    for layer in modules_of(model).values():
        restore(layer)
    for path, layer in adapted_layers(model).items():
        adapter, kernel = adapter_of(layer), layer.kernel.get_value()
        assert adapter is not None
        wide, target = adapter.weight(layer).reshape(kernel.shape), as_dtype(kernel.dtype if dtype is None else dtype)
        with np.errstate(over="ignore"):
            rounded = wide.astype(target)
        if np.any(np.isinf(rounded) & np.isfinite(wide)):
            raise UsageError(f"{path}/kernel overflows in {target} with its adapter merged: write a wider dtype")
        layer.kernel.set_value(jnp.asarray(rounded))
        unwrap(layer, type(adapter))
        for name in ("lora_a", "lora_b", "magnitude"):
            if name in vars(layer):
                delattr(layer, name)
