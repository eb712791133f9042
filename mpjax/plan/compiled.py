"""A training step compiled for a GPU that need not be there."""

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mpjax.config.commands import GpuName
from mpjax.errors import UsageError
from mpjax.plan.devices import GPUS
from mpjax.plan.flops import flops_of
from mpjax.plan.memory import Memory, memory_of
from mpjax.plan.step import Step
from mpjax.plan.target import mesh_of, toolkit_folder, traced_for


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step's program for one GPU of those that share its batch.

    Attributes:
      executable: a `jax.stages.Compiled`, which cannot be run here.
      memory: that it takes.
      flops: operations by dtype.
    """

    executable: Any
    memory: Memory
    flops: Mapping[str, float]


def start(
    pool: concurrent.futures.Executor, step: Step, name: GpuName, *, devices: int = 1, attention: str = "auto"
) -> "concurrent.futures.Future[Compiled]":
    """Traces a step now and compiles it in the pool: tracing is Python's, compiling is not.

    Args:
      pool: of threads.
      step: what is compiled.
      name: for which GPU.
      devices: how many of them share the batch.
      attention: "auto" (what a run on that GPU takes), "xla" or "cudnn".

    Raises:
      UsageError: attention that cannot be, or (the future) a step that XLA cannot compile for the GPU.
    """
    mesh = mesh_of(name, devices)
    given = step.on(mesh)
    with step.wide(), traced_for(GPUS[name], mesh.devices.flat[0], attention):
        traced = step.train_step.trace(*given)
        lowered = traced.lower()
    flops = {dtype: count / devices for dtype, count in flops_of(traced.jaxpr).items()}

    def finish() -> Compiled:
        executable = _compiled(lowered, name)
        return Compiled(executable, memory_of(step, executable.memory_analysis(), devices), flops)

    return pool.submit(finish)


def _compiled(lowered: Any, name: GpuName) -> Any:
    # Machine code is not looked at: the least of it will do.
    options: dict[str, Any] = {"xla_gpu_cuda_data_dir": toolkit_folder(), "xla_backend_optimization_level": 0}
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as first:
        # Triton's tiles are chosen by timing them on the device; for a few products there are none to take unseen.
        try:
            return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False})
        except jax.errors.JaxRuntimeError:
            raise UsageError(f"--gpu {name}: XLA cannot compile this step for it: {first}") from first
