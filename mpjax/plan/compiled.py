"""Compiles a training step for a GPU, which need not be present."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax

from mpjax.config.plan import GpuName
from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.plan.devices import GPUS
from mpjax.plan.memory import Memory, memory_of
from mpjax.plan.step import PlannedStep
from mpjax.plan.target import mesh_of, toolkit_folder, traced_for
from mpjax.precision.casting.flops import flops_of
from mpjax.precision.float8.recipes import require_units


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled program of a step, for one of the GPUs that share the batch.

    Attributes:
      executable: a `jax.stages.Compiled`, which cannot be run.
      jaxpr: the traced program.
      memory: the memory of the program on the device.
      flops: operations by dtype.
    """

    executable: Any
    jaxpr: Any
    memory: Memory
    flops: Mapping[str, float]


def start(
    pool: concurrent.futures.Executor, step: PlannedStep, name: GpuName, *, devices: int = 1, attention: str = "auto"
) -> "concurrent.futures.Future[Compiled]":
    """Traces and lowers a step now, and compiles it in a thread pool.

    Tracing runs in Python, so threads do not speed it up. Compilation runs outside Python.

    Args:
      pool: the thread pool.
      step: the step to compile.
      name: the GPU to compile for.
      devices: the number of GPUs that share the batch.
      attention: "auto" (the choice of a run on that GPU), "xla" or "cudnn".

    Raises:
      UsageError: the CUDA plugin is missing, XLA does not support the GPU, the GPU has no units for the policy's float8
        products, or the batch does not divide evenly. The future raises it if XLA cannot compile the step for the GPU.
    """
    require_units(step.plan.policy.recipes, GPUS[name].capability, f"--gpu {name}: {GPUS[name].name}")
    mesh = mesh_of(name, devices, **step.sizes)
    with step.wide(), traced_for(GPUS[name], mesh.devices.flat[0], attention):
        train_step, arguments = step.on(mesh)
        traced = train_step.trace(*arguments)
        lowered = traced.lower()
    # Shapes in the step are of a device's share of the batch, but whole over `tensor`, which the compiler divides.
    shards = mesh.shape[TENSOR]
    flops = {dtype: count / shards for dtype, count in flops_of(traced.jaxpr).items()}

    def finish() -> Compiled:
        executable = compiled_for(lowered, name, step.compiler_options(mesh))
        return Compiled(executable, traced.jaxpr, memory_of(*arguments, executable.memory_analysis()), flops)

    return pool.submit(finish)


@contextlib.contextmanager
def with_sources() -> Iterator[None]:
    """Context in which JAX compiles programs with the source lines of all operations.

    `mpjax.plan.traffic.costliest` reads these lines. JAX keeps ten frames of a traceback by default, so a layer's
    operations often have no line of the model. A program from JAX's compilation cache would have the lines of the code
    that compiled it.
    """
    options = {"jax_traceback_in_locations_limit": -1, "jax_compilation_cache_include_metadata_in_key": True}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def compiled_for(lowered: Any, name: GpuName, own: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Compiles a lowered program for a GPU, which need not be present; without Triton's products if it fails with them.

    Args:
      lowered: a `jax.stages.Lowered`.
      name: the GPU; the program was lowered for a device of it.
      own: further options of XLA, by name.

    Raises:
      UsageError: XLA cannot compile it for the GPU.
    """
    # The machine code is never read, so the lowest optimization level is enough. No real linker is needed: XLA finds
    # one as soon as PyTorch is imported, and it supports fewer GPUs.
    options = {
        **own,
        "xla_gpu_cuda_data_dir": toolkit_folder(),
        "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED",
        "xla_backend_optimization_level": 0,
    }
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as first:
        # XLA chooses Triton's tiles by timing them on the device. Without a device, a few products have no tiles.
        try:
            return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False, **options})
        except jax.errors.JaxRuntimeError:
            raise UsageError(f"--gpu {name}: XLA cannot compile this step for this GPU: {first}") from first
