"""Checks whether `--mesh.sequence` can divide the positions of a model."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.sharding import Mesh

from mpjax.config.schema import Config
from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, TENSOR
from mpjax.precision.calls import modules_of, wrap
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.sequence import divided_blocks
from mpjax.training.setup import Task
from mpjax.training.state import take_apart


def require_positions(
    config: Config, plan: PrecisionPlan, task: Task, batch: Mapping[str, Any], divided: Collection[str], mesh: Mesh
) -> None:
    """Checks that the blocks of a model and their divided layers take and return positions that divide.

    Args:
      config: the settings of the run.
      plan: the precision of the run.
      task: the task.
      batch: the shapes of a prepared batch, to trace the model.
      divided: the paths of the parameters that are divided over `tensor`.
      mesh: the mesh, whose axis `tensor` divides positions, after `context`.

    Raises:
      UsageError: `tensor` is 1; the run trains adapters or multiplies in float8; no layer of a block is divided, or one
        that is divided is a convolution; or a block has another argument or result than [B, T, D], or a T that the
        axes do not divide.
    """
    parts, multiple = mesh.shape[TENSOR], mesh.shape[TENSOR] * mesh.shape[CONTEXT]
    if parts == 1:
        raise UsageError("--mesh.sequence divides positions over tensor, and --mesh.tensor is 1: leave it out")
    if config.training.lora:
        raise UsageError(
            "--mesh.sequence with --training.lora: the compiler would add the gradients of adapters over tensor in the "
            "dtype of their products: leave out --mesh.sequence"
        )
    if plan.policy.recipes:
        raise UsageError(
            "--mesh.sequence with products in float8, which XLA cannot divide over tensor: write --precision.policy "
            "mixed_bfloat16"
        )
    name, blocks = type(task.abstract).__name__, divided_blocks(task.abstract, divided)
    if not blocks:
        raise UsageError(
            f"--mesh.sequence divides the values between layers of blocks, and no block of {name} (a module in a list) "
            "has a layer that is divided over tensor: leave it out"
        )
    for path, block in blocks.items():
        for inside, layer in modules_of(block).items():
            if isinstance(layer, nnx.Conv) and f"{path}/{inside}/kernel" in divided:
                raise UsageError(
                    f"--mesh.sequence divides positions, and {path}/{inside} of {name} is a convolution, which reads "
                    "those beside each: leave it out"
                )
    structure, params, stats = take_apart(task.abstract)
    values: list[tuple[str, Any]] = []

    def loss_of(params, stats, key, batch):
        model = structure.assemble(params, stats, key)
        model.train()
        for path, block in divided_blocks(model, divided).items():
            wrap(block, _Measures(path, values))
        return task.objective.loss_of(model, batch, key)[0]

    jax.eval_shape(loss_of, params, stats, jax.eval_shape(jax.random.key, 0), batch)
    length = f"take a multiple of {multiple} as --data.length, " if "tokens" in batch else ""
    for path, value in values:
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) != 3:
            what = f"a {type(value).__name__}" if shape is None else f"an array {list(shape)}"
            raise UsageError(
                f"--mesh.sequence divides positions, the second axis of [examples, positions, features], and {path} of "
                f"{name} takes or returns {what}: leave it out"
            )
        if shape[1] % multiple:
            raise UsageError(
                f"--mesh.sequence does not divide the {shape[1]} positions in {path} of {name} among --mesh.tensor "
                f"{parts}: {length}write another --mesh.tensor, or leave it out"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Measures:
    """A wrapper that writes down the shapes of a module's first argument and result, or a result that is no array."""

    path: str
    values: list[tuple[str, Any]]
    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        y = call(module, *args, **kwargs)
        for value in (*(*args, *kwargs.values())[:1], y):
            seen = jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
            self.values.append((self.path, seen))
        return y
