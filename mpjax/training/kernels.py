"""Which parameters are kernels, and decay; and which kernels are matrices, which Muon orthogonalizes.

Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Embeddings and heads are no hidden
layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from mpjax.models.scan import Stacks, names_apart, one_by_one, stack_of, stacks_of
from mpjax.precision.calls import modules_of
from mpjax.precision.dtypes import path_name
from mpjax.precision.heads import heads_of
from mpjax.precision.module_tree import class_names
from mpjax.precision.rules import is_norm


_ADAPTER = ("lora_a", "lora_b")
"""The attributes of a linear layer with the matrices of its adapter (`mpjax.models.lora`)."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a model: parameters of two axes or more, without `others`.

    Attributes:
      stacks: the stacks of blocks in the model.
      others: the paths of biases and of parameters of norms, which are no kernels with any number of axes.
      matrices: the numbers of input and output axes of the kernels of linear layers, except heads, and of the matrices
        of their adapters, by path. The output axes are the last axes of a kernel, and the input axes come before them.
        None: not known.

    Paths are those of single blocks, `blocks/3/mlp/up/kernel`.
    """

    stacks: Stacks = dataclasses.field(default_factory=dict)
    others: Collection[str] = frozenset()
    matrices: Mapping[str, tuple[int, int]] | None = None

    def mask(self, params: Any) -> Any:
        """Maps parameters to True for kernels and False for others, as optax masks weight decay."""

        def is_kernel(path: tuple, param: Any) -> bool:
            name = path_name(path)
            lead = 0 if stack_of(name, self.stacks) is None else 1
            return param.ndim - lead > 1 and names_apart(name, self.stacks)[0] not in self.others

        return jax.tree_util.tree_map_with_path(is_kernel, params)

    def dimension_numbers(self, params: Any) -> Any:
        """Maps parameters to the axes of matrices for `optax.contrib.muon`, and others to None."""

        def axes(path: tuple, _: Any) -> MuonDimensionNumbers | None:
            counts = (self.matrices or {}).get(names_apart(path_name(path), self.stacks)[0])
            if counts is None:
                return None
            inputs, outputs = counts
            return MuonDimensionNumbers(tuple(range(-inputs - outputs, -outputs)), tuple(range(-outputs, 0)))

        return jax.tree_util.tree_map_with_path(axes, params)


def kernels_of(model: nnx.Module) -> Kernels:
    """Finds the kernels of a model, which may be abstract."""
    modules = modules_of(one_by_one(model))
    heads = set(heads_of(modules))
    others, matrices = [], {}
    for path, module in modules.items():
        prefix = f"{path}/" if path else ""
        held = [name for name, value in vars(module).items() if isinstance(value, nnx.Param)]
        others += [f"{prefix}{name}" for name in held if name == "bias" or is_norm(class_names(module))]
        if isinstance(module, nnx.Linear | nnx.LinearGeneral) and path not in heads:
            matrices[f"{prefix}kernel"] = (_count(module.in_features), _count(module.out_features))
            matrices |= {f"{prefix}{name}": (1, 1) for name in held if name in _ADAPTER}
        matrices |= {f"{prefix}{name}": (1, 1) for name in getattr(type(module), "stacked_kernels", ())}
    return Kernels(stacks_of(model), frozenset(others), matrices)


def _count(features: Any) -> int:
    return 1 if isinstance(features, int) else len(features)


BY_AXES = Kernels()
"""The kernels where the model is not known: all parameters of two axes or more."""
