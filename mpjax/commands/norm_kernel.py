"""Checks whether a run can use the kernel of `--model.norm_kernel pallas`, by its device, mesh, casts and norms."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.models.devices import why_not_on
from mpjax.models.layer_norm import computes_in_float32, pre_norm
from mpjax.precision.calls import modules_of
from mpjax.precision.dtypes import FLOAT32
from mpjax.training.precision_plan import PrecisionPlan


def require_norm_kernel(model: nnx.Module, plan: PrecisionPlan, mesh: Mesh) -> None:
    """Checks that mpjax's Pallas kernel can compute the gradients of the layer norms in a model's blocks.

    Args:
      model: the model under its policy, which may be abstract.
      plan: the precision of the run.
      mesh: the devices of the run, all of the same kind as its first.

    Raises:
      UsageError: it cannot. The device is no NVIDIA GPU from Ampere on, JAX has no Pallas for Triton, the mesh has a
        `tensor` axis above 1, the run uses autocast, or a norm has another dtype than float32.
    """
    if reason := _why_not(model, plan, mesh):
        raise UsageError(f"--model.norm_kernel pallas {reason}; write --model.norm_kernel xla, or leave it out")


def _why_not(model: nnx.Module, plan: PrecisionPlan, mesh: Mesh) -> str | None:
    """The reason why a run cannot use the kernel, a phrase that follows the setting in a message; None if it can."""
    if reason := why_not_on(mesh.devices.flat[0]):
        return reason
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"needs Pallas for Triton, which JAX {jax.__version__} does not have"
    if mesh.shape[TENSOR] > 1:
        return f"cannot be divided over --mesh.tensor {mesh.shape[TENSOR]}, which the compiler divides"
    if plan.mode == "autocast":
        return "is one operation, and autocast casts the operations of a norm one by one: write --precision.mode module"
    if others := [path for path, norm in _norms(model) if not computes_in_float32(norm, FLOAT32)]:
        more = f" and {len(others) - 1} others" if others[1:] else ""
        return f"computes in float32, and the policy computes or stores {others[0]}{more} in another dtype"
    return None


def _norms(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yields path and module of `norm1` and `norm2` in each block whose `order` is the kernel's `pre_norm`."""
    for path, module in modules_of(model).items():
        if getattr(module, "order", None) is pre_norm:
            yield from ((f"{path}/{name}", getattr(module, name)) for name in ("norm1", "norm2"))
