"""Describes a GPU that need not be present, so that XLA compiles for it, and builds a mesh of such devices."""

import atexit
import contextlib
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from mpjax.config.plan import GpuName
from mpjax.errors import UsageError
from mpjax.jax_internals import cudnn_checks
from mpjax.plan.compiled_products import Target
from mpjax.plan.compiler import absent_devices, jaxlib_version
from mpjax.plan.devices import GPUS, Gpu
from mpjax.training.mesh import make_mesh


CUDNN = (9, 10, 0)
"""The cuDNN version that a plan assumes. It determines which cuDNN functions JAX may call."""


def mesh_of(name: GpuName, count: int, **sizes: int) -> Mesh:
    """Makes a mesh of `count` GPUs that need not be present, to compile for. By default, all GPUs are replicas.

    XLA's compiler for CUDA is downloaded if it is missing, as in `load_compiler`.

    Args:
      name: the kind of GPU.
      count: the number of GPUs.
      **sizes: the sizes of the mesh by axis, as in `make_mesh`.

    Raises:
      UsageError: XLA's compiler for CUDA cannot be downloaded or is of another version than jaxlib, it does not support
        the GPU, or the product of the sizes is not `count`.
    """
    return make_mesh(_devices(name, count), **sizes)


def target_of_gpu(gpu: Gpu) -> Target:
    """Describes a GPU as the `Target` of a receipt. It has tensorfloat32 from compute capability 8.0 on."""
    return Target(gpu.name, "gpu", tensorfloat32=gpu.capability >= (8, 0))


@functools.cache
def _devices(name: GpuName, count: int) -> list:
    try:
        return absent_devices(f"1x1x{count}", target_text(GPUS[name]))
    except UsageError:
        raise
    except Exception as error:  # the class depends on jaxlib's version
        version, others = jaxlib_version(), ", ".join(other for other in GPUS if other != name)
        raise UsageError(
            f"--gpu {name}: XLA in jaxlib {version} does not support it: {error}; choose another, such as {others}"
        ) from error


def target_text(gpu: Gpu) -> str:
    """Formats a GPU in protobuf text format, as XLA's `stream_executor.GpuTargetConfigProto` (xla/stream_executor)."""
    major, minor = gpu.capability
    # 9.0a and 10.0a add instructions of one generation alone. XLA uses them when it compiles on a real GPU.
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": gpu.threads,
        "core_count": gpu.multiprocessors,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": round(gpu.bandwidth),
        "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock / 1e9,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.shared_per_block,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} feature_extension: {feature} }}",
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_vendor": '"NVIDIA Corporation"',
        "platform_version": f'"Compute Capability {major}.{minor}{"a" if major >= 9 else ""}"',
        "device_address_bits": 64,
        "ecc_enabled": "true",
        "name": f'"{gpu.name}"',
        "driver_version": '"13.0.0"',
        "runtime_version": '"12.8.0"',
        "compile_time_toolkit_version": '"12.8.0"',
        "dnn_version": f'"{".".join(map(str, CUDNN))}"',
    }
    fields = "\n".join(f"  {name}: {value}".replace(": {", " {") for name, value in info.items())
    version = "major: {} minor: {} patch: {}".format(*CUDNN)
    return (
        f"gpu_device_info {{\n{fields}\n}}\n"
        'platform_name: "CUDA"\n'
        f"dnn_version_info {{ {version} }}\n"
        f'device_description_str: "{gpu.name}"\n'
    )


# Replaces ptxas and nvlink. A toolkit of this version supports all of mpjax.plan.devices. XLA needs an output file,
# whatever its content.
_SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 12.9, V12.9.86'; exit; fi
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo none > "$2"; exit; fi
  shift
done
"""


@functools.cache
def toolkit_folder() -> str:
    """Creates a temporary folder for XLA's option `xla_gpu_cuda_data_dir`, once in a process, and returns its path.

    The folder is removed when Python exits. Its `bin/ptxas` and `bin/nvlink` are scripts that compile nothing.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mpjax_plan_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "bin").mkdir()
    for name in ("ptxas", "nvlink"):
        (folder / "bin" / name).write_text(_SCRIPT, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    return str(folder)


@contextlib.contextmanager
def traced_for(gpu: Gpu, device: Any, implementation: str) -> Iterator[None]:
    """Context in which traced models choose their attention as on the planned GPU.

    Models choose their attention by JAX's default device, so the context sets that device. Except for "xla", it also
    replaces JAX's checks for cuDNN until it ends, in the whole process.

    Args:
      gpu: the GPU whose compute capability JAX's cuDNN checks see.
      device: a device of the GPU's mesh.
      implementation: "auto" or "cudnn" for the choice on the GPU; "xla" for the choice on a CPU, which is always XLA.
    """
    if implementation == "xla":
        with jax.default_device(jax.devices("cpu")[0]):
            yield
        return
    # JAX queries the installed cuDNN and the present GPU. Neither needs to exist here.
    checks = cudnn_checks()
    major, minor, patch = CUDNN
    answers = {
        "check_cudnn_version": lambda: major * 10_000 + minor * 100 + patch,
        "check_compute_capability": lambda capability: gpu.capability >= _numbers(capability),
        "is_cuda_compute_capability_equal": lambda capability: gpu.capability == _numbers(capability),
    }
    before = {name: getattr(checks, name) for name in answers}
    try:
        for name in before:
            setattr(checks, name, answers[name])
        with jax.default_device(device):
            yield
    finally:
        for name, function in before.items():
            setattr(checks, name, function)


def lowered_for(traced: Any, device: Any) -> Any:
    """Lowers a traced program while `device`, which may be absent, is JAX's default device.

    Pallas asks JAX's default device which instructions its kernels may use, whatever the program is lowered for.

    Args:
      traced: a `jax.stages.Traced`.
      device: a device of the program's mesh.

    Returns:
      The `jax.stages.Lowered` program.
    """
    with jax.default_device(device):
        return traced.lower()


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
