"""Compiles the training step of a run, with shapes instead of arrays, for a GPU that need not be present."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from mpjax.config.plan import GpuName, xla_options
from mpjax.errors import UsageError
from mpjax.mesh_axes import TENSOR
from mpjax.plan.devices import GPUS
from mpjax.plan.memory import Memory, memory_of
from mpjax.plan.target import lowered_for, mesh_of, toolkit_folder, traced_for
from mpjax.precision.calls import modules_of
from mpjax.precision.casting.flops import flops_of
from mpjax.precision.float8.recipes import require_units
from mpjax.training.escaped import trace
from mpjax.training.precision_plan import PrecisionPlan
from mpjax.training.setup import Placed, Task
from mpjax.training.state import TrainState
from mpjax.training.xla_options import compiler_options


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A training step and its abstract inputs.

    Attributes:
      policy: the name of the policy, as the user wrote it.
      plan: the precision plan.
      task: model, precision and objective.
      tx: the optimizer.
      build_on: builds the layout, the packing of the state and the jitted training step for a mesh.
      state: the abstract state, by path.
      batch: the abstract batch, by field.
      accumulate: number of micro-batches per batch.
      sizes: the sizes of the mesh by axis, of which one may be -1.
      overlap: True to compile with the options that let GPUs compute while they communicate.
      xla: further options of XLA, as the user wrote them.
      recomputes: True if the backward pass computes products again.
      sequence: True if meshes with `tensor` above 1 divide positions between layers over it.
    """

    policy: str
    plan: PrecisionPlan
    task: Task
    tx: optax.GradientTransformation
    build_on: Callable[[Mesh], Placed]
    state: TrainState
    batch: Mapping[str, jax.ShapeDtypeStruct]
    accumulate: int = 1
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    overlap: bool = True
    xla: str = ""
    recomputes: bool = False
    sequence: bool = False

    @property
    def batch_size(self) -> int:
        """The number of examples per step, over all devices."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens of an example that are predicted or classified; 0 for images.

        In language modeling it is one less than the length of the example, whose first token is not predicted.
        """
        if "tokens" not in self.batch:
            return 0
        return self.batch["tokens"].shape[1] - ("label" not in self.batch)  # the first is predicted from none

    @property
    def attention(self) -> bool:
        """True if the class name of one of the model's modules contains "Attention"."""
        return any("Attention" in type(module).__name__ for module in modules_of(self.task.abstract).values())

    def compiler_options(self, mesh: Mesh) -> dict[str, Any]:
        """XLA's options for the step on a mesh: those of a run, overwritten by the user's own."""
        return compiler_options(mesh, overlap=self.overlap) | xla_options(self.xla)

    def of(self, batch_size: int) -> "PlannedStep":
        """Returns a copy of the step for batches of `batch_size` examples over all devices."""
        batch = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in self.batch.items()}
        return dataclasses.replace(self, batch=batch)

    def on(self, mesh: Mesh) -> tuple[jax.stages.Wrapped, tuple[TrainState, Any]]:
        """Builds the jitted training step on a mesh, and its abstract arguments (state, batch) with their shardings."""
        layout, packing, train_step = self.build_on(mesh)
        batch_sharding = layout.batch(size=self.batch_size, accumulate=self.accumulate)
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding) for name, x in self.batch.items()
        }
        packed = jax.eval_shape(packing.pack, self.state)
        state = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), packed, layout.state(packed)
        )
        return train_step, (state, batch)

    def x64_if_float64(self) -> contextlib.AbstractContextManager:
        """Makes the context to trace the step in: `x64_if_float64` for its precision plan."""
        return x64_if_float64(self.plan)


def x64_if_float64(plan: PrecisionPlan) -> contextlib.AbstractContextManager:
    """Makes a context that enables x64 if a precision plan uses float64; otherwise JAX's own setting stays."""
    return jax.enable_x64(jax.config.read("jax_enable_x64") or plan.float64)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled program of a step, for one of the GPUs that share the batch.

    Attributes:
      executable: a `jax.stages.Compiled`, which cannot be run.
      jaxpr: the traced program.
      memory: the memory of the program on the device.
      flops: floating-point operations of matrix products and convolutions on the device in one step, by dtype of the
        operands.
    """

    executable: Any
    jaxpr: Any
    memory: Memory
    flops: Mapping[str, float]


def start(
    pool: concurrent.futures.Executor, step: PlannedStep, name: GpuName, *, devices: int = 1, attention: str = "auto"
) -> "concurrent.futures.Future[Compiled]":
    """Traces and lowers a step now, and compiles it in a thread pool; the future has the compiled program.

    Tracing runs in Python, so threads do not speed it up. Compilation runs outside Python. XLA's compiler for CUDA is
    downloaded if it is missing.

    Args:
      pool: the thread pool.
      step: the step to compile.
      name: the GPU to compile for.
      devices: the number of GPUs that share the batch.
      attention: "xla"; or "auto" or "cudnn", both for the choice of a run on that GPU.

    Raises:
      UsageError: XLA's compiler for CUDA is missing, XLA does not support the GPU, the GPU has no units for the float8
        products of the policy, or the batch does not divide evenly. The future raises it if XLA cannot compile the step
        for the GPU.
    """
    require_units(step.plan.policy.recipes, GPUS[name].capability, f"--gpu {name}: {GPUS[name].name}")
    mesh = mesh_of(name, devices, **step.sizes)
    with step.x64_if_float64(), traced_for(GPUS[name], mesh.devices.flat[0], attention):
        train_step, arguments = step.on(mesh)
        traced = trace(train_step, *arguments)
        lowered = lowered_for(traced, mesh.devices.flat[0])
    # Shapes in the step are of a device's share of the batch, but whole over `tensor`, which the compiler divides.
    flops = flops_of(traced.jaxpr, {TENSOR: mesh.shape[TENSOR]})

    def finish() -> Compiled:
        executable = compiled_for(lowered, name, step.compiler_options(mesh))
        return Compiled(executable, traced.jaxpr, memory_of(*arguments, executable.memory_analysis()), flops)

    return pool.submit(finish)


@contextlib.contextmanager
def with_sources() -> Iterator[None]:
    """Context that changes JAX's settings so that compiled programs have the source lines of all operations.

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


def compiled_for(lowered: Any, name: GpuName, extra_options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Compiles a lowered program for a GPU, which need not be present; the result can be read, but not run or timed.

    If that fails, compiles it again with XLA's option that leaves no matrix product to Triton.

    Args:
      lowered: a `jax.stages.Lowered`.
      name: the GPU; the program was lowered for a device of it.
      extra_options: further options of XLA, by name. Three options that a plan needs replace these; the option of the
        second attempt does not.

    Raises:
      UsageError: XLA cannot compile it for the GPU.
    """
    # The machine code is never read, so the lowest optimization level is enough. No real linker is needed: XLA finds
    # one as soon as PyTorch is imported, and it supports fewer GPUs.
    options = {
        **extra_options,
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
