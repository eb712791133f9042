"""Keeps freed memory in a process that computes on a CPU, instead of returning it to the kernel each time."""

import ctypes
import importlib.util
import os
import sys
from importlib.metadata import entry_points


_SETTINGS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**30), "M_ARENA_MAX": (-8, 1)}
"""Arguments of glibc's mallopt: take large blocks from the heap too, keep up to 1 GB of free memory, use one heap."""


def keep_freed_memory() -> bool:
    """Sets glibc's allocator to keep up to 1 GB of freed memory in this process, if JAX will compute on a CPU.

    XLA allocates the memory of each call anew. By default, glibc returns large blocks to the kernel as soon as they are
    freed. The kernel then clears every page of the next block, which took up to half the time of a step
    (docs/performance.md).

    Call it before JAX, scikit-learn or others start threads, because a thread keeps its first heap. Nothing changes on
    other systems, with another C library, or if the environment already sets glibc's memory, in GLIBC_TUNABLES or one
    of `_VARIABLES`.

    Returns:
      True if glibc accepted all settings; False also if nothing was changed.
    """
    if sys.platform != "linux" or _is_set_by_user() or not _computes_on_cpu():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    results = [mallopt(*setting) for setting in _SETTINGS.values()]
    return all(results)


_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)


def _computes_on_cpu() -> bool:
    """True if JAX will use a CPU, by `JAX_PLATFORMS` or, without it, by the installed plugins; JAX is not imported."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None
