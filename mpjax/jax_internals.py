"""The private names of JAX that mpjax needs, each looked up on use.

A version of JAX may move or remove a name. Then the function that needs it raises an error that names it and a
workaround. Everything else keeps working.
"""

import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

import jax

from mpjax.errors import UsageError


def cluster_environment() -> Any:
    """Returns JAX's class `ClusterEnv`, which detects the other processes of a cluster from environment variables.

    `jax.distributed.initialize` also calls it, but reports nothing before it connects.

    Raises:
      UsageError: this version of JAX lacks the class.
    """
    flags = "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I"
    return _private("jax._src.clusters", "ClusterEnv", f"the detection of clusters; write {flags}")


def distributed_client() -> Any:
    """Returns JAX's client of its coordination service, once `jax.distributed.initialize` has connected the processes.

    It has the key-value store. The published `jax.experimental.multihost_utils` sends values through the devices.

    Raises:
      UsageError: this version of JAX lacks it.
    """
    purpose = "a run of several processes; write --distributed.processes 1"
    return _private("jax._src.distributed", "global_state", purpose).client


def exchange_on_cpus_at(address: str) -> None:
    """Makes the CPUs of several processes connect to each other by Gloo at `address`, one of this machine.

    It has to be called after `jax.distributed.initialize` and before JAX starts its devices. It does nothing if
    `jax_cpu_collectives_implementation` names another library than Gloo.

    Raises:
      UsageError: this version of JAX cannot.
    """
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) != "gloo":
        return
    purpose = "sums over several processes on CPUs; write --distributed.processes 1"
    make_client = _private("jax._src.xla_bridge", "make_cpu_client", purpose)
    make_gloo = _private("jax._src.lib", "_jax", purpose).make_gloo_tcp_collectives
    client = distributed_client()
    register = _private("jax._src.xla_bridge", "register_backend_factory", purpose)
    register("cpu", lambda: make_client(make_gloo(client, hostname=address)), priority=0, fail_quietly=False)


def register_compiler(library: str) -> None:
    """Registers the shared library `library` as JAX's compiler for the platform "cuda", as the plugin package would.

    Raises:
      UsageError: this version of JAX cannot.
    """
    version = importlib.metadata.version("jaxlib")
    packages = " ".join(f"{package}=={version}" for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"))
    purpose = f"loading a compiler without its packages; write: pip install --no-deps {packages}"
    register = _private("jax._src.xla_bridge", "register_plugin", purpose)
    register("cuda", priority=0, library_path=library)


CUDNN_CHECKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
"""The checks that JAX runs before it computes an attention with cuDNN."""


def cudnn_checks() -> ModuleType:
    """Imports the module of JAX that holds `CUDNN_CHECKS`, and checks that it has them all.

    Raises:
      UsageError: this version of JAX lacks the module or one of the checks.
    """
    module = "jax._src.cudnn.fused_attention_stablehlo"
    for name in CUDNN_CHECKS:
        _private(module, name, "planning attention on a GPU that is not here; write: mpjax plan --attention xla")
    return importlib.import_module(module)


def has_computed_on_cpu() -> bool:
    """True if JAX has already initialised its devices and the default one is a CPU; it does not initialise them.

    False also if this version of JAX does not tell.
    """
    try:
        started = _private("jax._src.xla_bridge", "_backends", "")
    except UsageError:
        return False
    return bool(started) and jax.default_backend() == "cpu"


def _private(module: str, name: str, purpose: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"JAX {jax.__version__} has no {module}.{name}, needed for {purpose}") from error
