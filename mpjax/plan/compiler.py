"""Finds, installs and loads XLA's compiler for CUDA, visible to plans only and to no other JAX program."""

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from mpjax.config.folders import default_cache_folder, made
from mpjax.config.program import command_line
from mpjax.errors import UsageError
from mpjax.files import open_to_others
from mpjax.jax_internals import register_compiler


PACKAGES = (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt"))
"""The pairs of CUDA packages of JAX; either pair is enough."""
PACKAGE = "jax-cuda12-pjrt"
"""The package that holds the compiler. Every JAX program that finds the package runs its hook."""
LIBRARY = "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
"""The path of the compiler in the package."""
NOISE = ("cudart_stub.cc", "before absl::InitializeLog()")
"""Substrings of the lines that the compiler prints without a driver."""


def compiler_folder() -> pathlib.Path:
    """The folder in mpjax's cache for the CUDA compiler of this version of jaxlib. It need not exist."""
    return default_cache_folder() / "cuda_compiler" / jaxlib_version()


def jaxlib_version() -> str:
    """The version of jaxlib, which is also the version of its compiler for CUDA."""
    return importlib.metadata.version("jaxlib")


def has_compiler() -> bool:
    """True if the compiler is in the cache folder, or a package of JAX for a GPU is installed, in any version."""
    return (compiler_folder() / LIBRARY).is_file() or any(_version(package) for pair in PACKAGES for package in pair)


def require_compiler() -> None:
    """Raises UsageError unless XLA's compiler for CUDA is installed in jaxlib's version. Downloads nothing.

    It is in JAX's packages for GPUs, or else in `compiler_folder()`. Packages of another version, or one of a pair
    alone, are an error even if the folder has the right compiler, because JAX would load them.
    """
    expected, install = jaxlib_version(), command_line("plan", "--install")
    versions = [{package: _version(package) for package in pair} for pair in PACKAGES]
    if any(set(pair.values()) == {expected} for pair in versions):
        return
    some = next((pair for pair in versions if any(pair.values())), None)
    if some:
        wrong = [
            f"{package} {version or 'is not installed'}" for package, version in some.items() if version != expected
        ]
        exact = " ".join(f"{package}=={expected}" for package in some)
        present = " ".join(package for package, version in some.items() if version)
        raise UsageError(
            f"a plan needs jaxlib's CUDA packages in jaxlib's version {expected}; {', '.join(wrong)}; write: "
            f"pip install --no-deps {exact}, or without a GPU: pip uninstall {present}, then {install}"
        )
    if not (compiler_folder() / LIBRARY).is_file():
        raise UsageError(
            f"a plan needs XLA's compiler for CUDA of jaxlib {expected}; write: {install}, which downloads it to "
            f"{compiler_folder()} (175 MB, 460 MB unpacked), where no other JAX program sees it"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_compiler() -> pathlib.Path:
    """Downloads the compiler of jaxlib's version by pip to `compiler_folder()` if it is not there; returns that folder.

    Packages of JAX for GPUs that are installed already make no difference.

    Raises:
      UsageError: pip is missing, or cannot install the package, or the folder holds something else.
    """
    folder = compiler_folder()
    if (folder / LIBRARY).is_file():
        return folder
    made(folder.parent, mode=0o700)
    options = ["install", "--no-deps", "--disable-pip-version-check", "--only-binary", ":all:"]
    package = f"{PACKAGE}=={jaxlib_version()}"
    # Two plans may install at once, and one may be interrupted: only a complete folder gets its final name.
    unfinished = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
    try:
        command = [sys.executable, "-m", "pip", *options, "--target", unfinished, package]
        done = subprocess.run(command, check=False, stdout=2)  # stdout is for the plan
        if done.returncode or not pathlib.Path(unfinished, LIBRARY).is_file():
            raise UsageError(
                f"{sys.executable} -m pip cannot install {package}, see above; with another installer, write: "
                f"uv pip install --no-deps --target {folder} {package}"
            )
        try:
            os.rename(unfinished, folder)
        except OSError as error:
            if not (folder / LIBRARY).is_file():  # else another plan was faster
                raise UsageError(
                    f"the compiler cannot be moved to {folder}: {error.strerror}; remove that folder, and write: "
                    f"{command_line('plan', '--install')}"
                ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@functools.cache
def load_compiler() -> None:
    """Registers the CUDA compiler with JAX, once in a process, and downloads it first if it is missing.

    JAX can then describe CUDA devices that are absent. The devices that it computes on do not change. If JAX's packages
    for GPUs are installed, there is nothing to register.

    Raises:
      UsageError: as `require_compiler`, or the compiler is missing and cannot be downloaded, or another user can
        write in its folder.
    """
    if not has_compiler():
        print(f"downloading XLA's compiler for CUDA (175 MB) to {compiler_folder()}", file=sys.stderr)
        install_compiler()
    require_compiler()
    if any(_version(package) for pair in PACKAGES for package in pair):
        return  # JAX loads its own packages when it first looks for devices
    if danger := open_to_others(compiler_folder(), "another folder in $MPJAX_CACHE"):
        raise UsageError(f"the compiler in {compiler_folder()} is not loaded: {danger}")
    # JAX does not compute on platforms that are registered after it has chosen its devices.
    jax.devices()
    with without_noise():
        register_compiler(str(compiler_folder() / LIBRARY))


def absent_devices(topology: str, target: str) -> list[Any]:
    """Loads the compiler, as `load_compiler`, and lists CUDA devices that programs can be compiled for.

    The devices need not be present. A missing compiler is downloaded.

    Args:
      topology: partitions, hosts per partition and devices per host, such as "1x1x8".
      target: the device, as `mpjax.plan.target.target_text` formats it.

    Raises:
      UsageError: as `load_compiler`. If the topology is malformed or XLA does not support the device, JAX's own error
        passes.
    """
    load_compiler()
    with _without_cuda(), without_noise():
        return list(topologies.get_topology_desc(platform="cuda", topology=topology, target_config=target).devices)


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    """Context in which JAX's GPU packages do not check for CUDA libraries, by an environment variable.

    Compilation does not need the libraries. A variable that is set already is kept.
    """
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    setting = os.environ.get(variable)
    os.environ.setdefault(variable, "1")
    try:
        yield
    finally:
        if setting is None:
            del os.environ[variable]


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Context that drops the lines with a substring of `NOISE` from this process's stderr, also those of C++ code.

    Other lines are held back, and written when the `with` block ends.
    """
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            written.seek(0)
            for line in written:
                if not any(mark.encode() in line for mark in NOISE):
                    os.write(2, line)
