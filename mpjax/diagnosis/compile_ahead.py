"""Operations, each a program of its own: compiled ahead of time for its arrays, or NumPy's where these are small.

An operation that JAX dispatches by itself leaves 1.4 MB behind for each shape, and one compiled ahead of time 0.2 MB
(jax 0.10.2 on a CPU). A ResNet-50's step has 700 of them: that is as much as half of its arrays.

To compile a program takes about 50 ms on a CPU, which for small arrays is nearly all of what it takes. NumPy's function
of the same gives the same bits.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer


KEPT = 4096
"""Programs; a search runs the same ones again and again."""

P = ParamSpec("P")
R = TypeVar("R")


SMALL = 2**14
"""Values; arrays of no more together are small."""


def compiled(fn: Callable[P, R], numpy: Callable | None = None) -> Callable[P, R]:
    """`fn` of arrays, and of keyword options that can be hashed, compiled; within another program, a part of that.

    Args:
      fn: in JAX.
      numpy: the same in NumPy, for small arrays on a CPU; gives None where it has no such function.
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
            program = _program(fn, tuple(options.items()), tuple((x.shape, x.dtype) for x in arrays))
        except TypeError:  # an option that cannot be hashed
            return fn(*arrays, **options)
        return program(*arrays)

    return call  # pyright: ignore[reportReturnType]


def _are_small(arrays) -> bool:
    """Whether they are small arrays on a CPU, in dtypes that NumPy has: random keys are none."""
    plain = all(isinstance(array.dtype, np.dtype) for array in arrays)
    return plain and sum(map(np.size, arrays)) <= SMALL and jax.local_devices()[0].platform == "cpu"


def brought_here(array):
    """Returns an array of several devices, as a run has them, on the one for which programs are compiled."""
    if isinstance(array, Tracer) or _is_here(array) or not array.is_fully_addressable:
        return array
    return jax.device_put(array, jax.local_devices()[0])


def _is_here(array) -> bool:
    """Whether it is an array on the default device and on no other, for which programs are compiled."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.devices() == {jax.local_devices()[0]}


@functools.lru_cache(maxsize=KEPT)
def _program(fn: Callable, options: tuple, shapes: tuple):
    def run(*arrays):  # a function of its own, so that JAX keeps nothing of it for others
        return fn(*arrays, **dict(options))

    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()


def _trim():
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc; elsewhere there is none
    except (AttributeError, OSError, TypeError):
        return lambda padding: 0


_malloc_trim = _trim()


def give_back() -> None:
    """Lets go of what the C library has free.

    Arrays of many sizes that come and go one by one leave holes between those that stay. Glibc keeps them: in a
    ResNet-50 they are as large as half of the arrays themselves.
    """
    _malloc_trim(0)
