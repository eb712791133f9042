"""Keeps memory that a CPU has freed for what it computes next, in place of asking the kernel for it again."""

import ctypes
import importlib.util
import os
import sys
from importlib.metadata import entry_points


_SETTINGS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_ARENA_MAX": (-8, 1)}
"""What glibc's mallopt is told: take no large block from the kernel alone, return none to it, keep one heap."""


def keep_freed_memory() -> bool:
    """Keeps freed memory in this process if it computes on a CPU and uses glibc.

    XLA allocates the memory of each call anew. By default, glibc returns blocks of more than 32 MB to the kernel as
    soon as they are freed, and the kernel clears every page of the next one: up to half the time of a step on a CPU
    (docs/performance.md). Kept memory is returned when the process ends.

    To be called before JAX starts its threads. Nothing changes where the environment sets glibc's memory already: in
    GLIBC_TUNABLES, or one of `_VARIABLES`.

    Returns:
      True if freed memory is kept from here on.
    """
    if sys.platform != "linux" or _is_set_by_user() or not _computes_on_cpu():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    taken = [mallopt(*setting) for setting in _SETTINGS.values()]
    return all(taken)


_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)


def _computes_on_cpu() -> bool:
    """Returns True if JAX will take a CPU, without starting it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] == "cpu"
    return not entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None
