"""The names of JAX that mpjax needs and JAX does not publish: all of them are looked up here, when they are needed.

A version of JAX may move or remove them. Then the function that needs one says which, and what to do without it;
everything else works on.
"""

import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

import jax

from mpjax.errors import UsageError


def cluster_environment() -> Any:
    """Returns the class that finds the other processes of a cluster.

    `jax.distributed.initialize` calls it too, but does not tell what it found before it connects.

    Raises:
      UsageError: this version of JAX has no such class.
    """
    flags = "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I"
    return _private("jax._src.clusters", "ClusterEnv", f"the detection of clusters; write {flags}")


def register_compiler(library: str) -> None:
    """Makes the shared library `library` JAX's compiler for the platform "cuda", as the hook of its package would.

    Raises:
      UsageError: this version of JAX cannot.
    """
    version = importlib.metadata.version("jaxlib")
    packages = " ".join(f"{package}=={version}" for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"))
    purpose = f"loading a compiler without its packages; write: pip install --no-deps {packages}"
    register = _private("jax._src.xla_bridge", "register_plugin", purpose)
    register("cuda", priority=0, library_path=library)


CUDNN_CHECKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
"""What JAX asks before it computes an attention with cuDNN."""


def cudnn_checks() -> ModuleType:
    """Returns the module that holds `CUDNN_CHECKS`.

    Raises:
      UsageError: this version of JAX has no such module, or it lacks one of them.
    """
    module = "jax._src.cudnn.fused_attention_stablehlo"
    for name in CUDNN_CHECKS:
        _private(module, name, "planning attention on a GPU that is not here; write: mpjax plan --attention xla")
    return importlib.import_module(module)


def _private(module: str, name: str, purpose: str) -> Any:
    """Returns a name of a module of JAX."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"JAX {jax.__version__} has no {module}.{name}, needed for {purpose}") from error
