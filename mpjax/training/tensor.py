"""Decides which layers of a model are divided over the `tensor` axis of a mesh, and along which axis.

The first layer of attention or of an MLP is divided by columns (heads, hidden units), the second by rows. Devices then
add their results once for each pair (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from mpjax.config.choices import Way
from mpjax.errors import UsageError
from mpjax.models.quantised import SCALES
from mpjax.models.scan import stack_of, stacks_of
from mpjax.precision.calls import modules_of
from mpjax.precision.module_tree import lineages_of
from mpjax.precision.rules import Rules, decide, winner


TRANSFORMERS: Mapping[str, Way] = {
    "*attention/query": "columns",
    "*attention/key": "columns",
    "*attention/value": "columns",
    "*attention/out": "rows",
    "*mlp/gate": "columns",
    "*mlp/up": "columns",
    "*mlp/down": "rows",
    "*mlp/experts": "columns",
}
"""The rules for the Transformers of `mpjax.models`."""

LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Conv)
"""The layers that can be divided."""


def tensor_axes(model: nnx.Module, parts: int, rules: Mapping[str, str]) -> dict[str, int]:
    """Chooses the index of the axis along which to divide each parameter over the mesh's axis `tensor`, by path.

    Parameters that are not divided are left out. In a stack of blocks, the leading axis of blocks is counted.

    Args:
      model: the model, which may be abstract.
      parts: the size of the mesh's axis `tensor`.
      rules: the user's rules, from module pattern (see `mpjax.precision.rules.Rules`) to "columns" (divide the
        outputs), "rows" (divide the inputs) or "whole" (do not divide). The rules `TRANSFORMERS` come after them.

    Raises:
      UsageError: a rule matches nothing or names no layer that can be divided, an axis does not divide, a layer's
        weight is stored in codes, or no layer is divided at all.
    """
    modules = modules_of(model)
    lineages, stacks = lineages_of(modules), stacks_of(model)
    user_rules = Rules(rules)
    decide(user_rules, lineages)  # raises if a rule matches nothing
    every = Rules(
        {**user_rules, **{pattern: way for pattern, way in TRANSFORMERS.items() if pattern not in user_rules}}
    )
    axes: dict[str, int] = {}
    idle = {pattern for pattern, way in user_rules.items() if way != "whole"}
    for lineage in lineages:
        path, pattern = lineage[-1][0], winner(every, lineage)
        hidden = getattr(type(modules[path]), "hidden_axes", {})
        if pattern is not None and every[pattern] != "whole" and hidden:
            axes |= dict(_hidden_axes(path, modules[path], hidden, parts))
            idle.discard(pattern)
        if pattern is not None and every[pattern] != "whole" and isinstance(modules[path], LAYERS):
            if hasattr(modules[path], SCALES):
                raise UsageError(
                    f"--mesh.tensor {parts} divides {path}, and --training.lora_base int8 and nf4 store its weight in "
                    "codes, which are not divided: write --mesh.tensor 1, or --training.lora_base bfloat16"
                )
            lead = 0 if stack_of(f"{path}/kernel", stacks) is None else 1
            axes |= dict(_axes(path, modules[path], every[pattern], parts, lead))
            idle.discard(pattern)
    if idle:
        raise UsageError(
            f"--mesh.rules {', '.join(sorted(idle))}: names no linear layer or convolution, which alone can be divided"
        )
    if not axes:
        raise UsageError(
            f"--mesh.tensor {parts} divides no layer of {type(model).__name__}: name its layers, as in --mesh.rules "
            "'layers/*/up' columns 'layers/*/down' rows, or write --mesh.tensor 1"
        )
    return axes


def _hidden_axes(path: str, experts: Any, hidden: Mapping[str, int], parts: int) -> Iterator[tuple[str, int]]:
    """Yields `(path, axis to divide)` of the kernels of experts: each expert's hidden units are divided.

    Raises UsageError if `parts` does not divide their number.
    """
    for name, axis in hidden.items():
        shape = getattr(experts, name).shape
        if shape[axis] % parts:
            raise UsageError(
                f"--mesh.tensor {parts} does not divide {path}, whose experts have {shape[axis]} hidden units: "
                f"wanted a divisor of {shape[axis]}, or --mesh.rules '{path}' whole"
            )
        yield f"{path}/{name}", len(shape) + axis


def _axes(path: str, layer: Any, way: Way, parts: int, lead: int) -> Iterator[tuple[str, int]]:
    """Yields `(path, axis to divide)` of the kernel, and of the bias if its outputs are divided ("columns").

    `lead` is the number of axes in front of a single block's axes: 1 in a stack, else 0. Raises UsageError if `parts`
    does not divide the length of the axis.
    """
    kernel = layer.kernel.shape
    outputs = len(layer.out_features) if isinstance(layer.out_features, tuple | list) else 1
    axis = len(kernel) - outputs
    if way == "rows":
        axis = axis - 1 if isinstance(layer, nnx.Conv) else lead
    if kernel[axis] % parts:
        fitting = [str(size) for size in range(1, kernel[axis] + 1) if kernel[axis] % size == 0]
        raise UsageError(
            f"--mesh.tensor {parts} does not divide {path}, which has {kernel[axis]} "
            f"{'outputs or heads' if way == 'columns' else 'inputs or heads'}: wanted one of {', '.join(fitting[:8])}"
        )
    yield f"{path}/kernel", axis
    if way == "columns" and layer.bias is not None:
        yield f"{path}/bias", lead
