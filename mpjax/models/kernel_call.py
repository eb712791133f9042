"""Calls that a hand-written kernel computes on NVIDIA GPUs, and that are their plain form everywhere else.

The program holds the plain form: autocast, receipts, rules and the diagnosis enter it like any call. XLA's input is
chosen when the program is lowered for a platform.
"""

import functools
from collections.abc import Callable

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from mpjax.precision.casting.primitives import KERNEL_CALL


def kernel_call(plain: Callable, kernel: Callable, *arrays: jax.Array) -> list[jax.Array]:
    """Computes `plain(*arrays)`; a program for an NVIDIA GPU runs `kernel(*arrays)` in its place.

    Under `jax.vmap`, and in derivatives of the call, the plain form runs on all platforms.

    Args:
      plain: a function that returns several arrays.
      kernel: a hashable function with results of the same shapes and dtypes. It is not called on other platforms.
      *arrays: the arguments.
    """
    return _CALL.bind(*arrays, jaxpr=jax.make_jaxpr(plain)(*map(jax.typeof, arrays)), kernel=kernel)


_CALL = core.Primitive(KERNEL_CALL)
_CALL.multiple_results = True


@_CALL.def_impl
def _run(*arrays, jaxpr, kernel):
    return _compiled(jaxpr, kernel)(*arrays)


@functools.lru_cache(maxsize=64)
def _compiled(jaxpr, kernel) -> Callable:
    return jax.jit(functools.partial(_CALL.bind, jaxpr=jaxpr, kernel=kernel))


@_CALL.def_abstract_eval
def _shapes(*avals, jaxpr, kernel):
    del avals, kernel
    return jaxpr.out_avals


def _plain(*arrays, jaxpr, kernel):
    del kernel
    return core.jaxpr_as_fun(jaxpr)(*arrays)


def _by_kernel(*arrays, jaxpr, kernel):
    del jaxpr
    return kernel(*arrays)


def _derivative(primals, tangents, *, jaxpr, kernel):
    del kernel
    return jax.jvp(core.jaxpr_as_fun(jaxpr), [*primals], [*map(ad.instantiate_zeros, tangents)])


def _batched(arrays, axes, *, jaxpr, kernel):
    del kernel
    results = jax.vmap(core.jaxpr_as_fun(jaxpr), axes)(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_CALL] = _derivative
batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, mlir.lower_fun(_plain, multiple_results=True))
mlir.register_lowering(_CALL, mlir.lower_fun(_by_kernel, multiple_results=True), platform="cuda")
