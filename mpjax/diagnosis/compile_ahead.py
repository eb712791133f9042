"""Runs single operations: compiled ahead of time for the shapes of their arrays, or in NumPy if the arrays are small.

An operation that JAX dispatches keeps 1.4 MB of memory for each shape; one compiled ahead of time keeps 0.2 MB
(jax 0.10.2 on a CPU). A ResNet-50's step has 700 of them, which adds up to half the size of its arrays.

Compilation takes about 50 ms on a CPU, which is nearly all of the time of an operation on small arrays. The same
operation in NumPy gives the same bits.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from mpjax.precision.dtypes import default_device


KEPT = 4096
"""The number of cached programs. A search runs the same programs many times."""

P = ParamSpec("P")
R = TypeVar("R")


SMALL = 2**14
"""The largest total number of values in the arrays of an operation that NumPy computes."""


def compiled(fn: Callable[P, R], numpy: Callable | None = None) -> Callable[P, R]:
    """Wraps `fn` so that it runs compiled ahead of time for the shapes of its arrays, or in NumPy if they are small.

    Small means at most `SMALL` values in all, on a CPU; the result is then a NumPy array. The last `KEPT` compiled
    programs are cached.

    Within a trace, and if an array is not on the default device alone, the wrapper calls `fn` itself.

    Args:
      fn: a JAX function of arrays, and of keyword options. If an option cannot be hashed, `fn` runs uncompiled.
      numpy: the same function in NumPy, for small arrays on a CPU; it returns None for unsupported cases, which then
        run compiled.
    """

    @functools.wraps(fn)
    def call(*arrays, **options):
        if not all(map(_is_here, arrays)):
            return fn(*arrays, **options)
        if numpy is not None and _are_small(arrays):
            with np.errstate(all="ignore"):
                result = numpy(*map(np.asarray, arrays), **options)
            if result is not None:
                return result
        try:
            shapes = tuple((x.shape, x.dtype) for x in arrays)
            program = _program(fn, tuple(options.items()), shapes, default_device())
        except TypeError:  # an option that cannot be hashed
            return fn(*arrays, **options)
        return program(*arrays)

    return call  # pyright: ignore[reportReturnType]


def _are_small(arrays) -> bool:
    """True for small arrays of NumPy dtypes on a CPU. Random keys have other dtypes."""
    plain = all(isinstance(array.dtype, np.dtype) for array in arrays)
    return plain and sum(map(np.size, arrays)) <= SMALL and default_device().platform == "cpu"


def brought_here(array):
    """Copies a JAX array to the default device, for which programs are compiled.

    Returns NumPy arrays, tracers, and arrays with shards on other processes as they are.
    """
    if isinstance(array, Tracer) or _is_here(array) or not array.is_fully_addressable:
        return array
    return jax.device_put(array, default_device())


def _is_here(array) -> bool:
    """True for an array on the host, or on the default device alone, for which programs are compiled."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.devices() == {default_device()}


@functools.lru_cache(maxsize=KEPT)
def _program(fn: Callable, options: tuple, shapes: tuple, device):
    """Compiles `fn` for the default device, with a cache.

    `device` is the default device. It is only a part of the cache's key. The shapes have no sharding, so that results
    are not committed to the device: a `shard_map` moves them.
    """

    def of_arrays(*arrays):  # a new function, so that JAX shares no cache between programs
        return fn(*arrays, **dict(options))

    return jax.jit(of_arrays).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()


def _trim():
    """Finds glibc's `malloc_trim`; without glibc, a function that does nothing."""
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc only
    except (AttributeError, OSError, TypeError):
        return lambda padding: 0


_malloc_trim = _trim()


def give_back() -> None:
    """Releases the C library's free memory to the operating system; does nothing without glibc.

    Allocation of arrays of many sizes leaves holes between the live arrays. Glibc keeps the holes: in a ResNet-50 they
    take half as much memory as the arrays themselves.
    """
    _malloc_trim(0)
