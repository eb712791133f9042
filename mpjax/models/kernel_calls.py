"""Calls that a kernel written by hand computes on NVIDIA GPUs, and that are their plain form everywhere else.

The program holds the plain form: autocast, receipts, rules and the diagnosis enter it as they enter any call. Which of
the two XLA is given is chosen when the program is lowered for a platform.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from mpjax.precision.casting.primitives import KERNEL_CALL


def kernel_call(plain: Callable, kernel: Callable, *arrays: jax.Array, **settings: Any) -> list[jax.Array]:
    """Computes `plain(*arrays, **settings)`; a program for an NVIDIA GPU runs `kernel(*arrays, **settings)` instead.

    Under `jax.vmap`, and in derivatives of the call, the plain form runs on all platforms.

    Args:
      plain: a function that returns several arrays, and reads nothing but its arguments.
      kernel: a function with results of the same shapes and dtypes. It is not called for other platforms.
      *arrays: the arguments.
      **settings: hashable arguments that are known at trace time.
    """
    jaxpr = _traced(plain, tuple(map(jax.typeof, arrays)), tuple(settings.items()))
    return _CALL.bind(*arrays, jaxpr=jaxpr, kernel=kernel, settings=tuple(settings.items()))


@functools.lru_cache(maxsize=256)
def _traced(plain: Callable, avals: tuple, settings: tuple) -> Any:
    return jax.make_jaxpr(functools.partial(plain, **dict(settings)))(*avals)


_CALL = core.Primitive(KERNEL_CALL)
_CALL.multiple_results = True


@_CALL.def_impl
def _run(*arrays, **params):
    return _compiled(**params)(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(**params) -> Callable:
    return jax.jit(functools.partial(_CALL.bind, **params))


@_CALL.def_abstract_eval
def _results(*_, jaxpr, **__):
    return jaxpr.out_avals


def _plain(*arrays, jaxpr, **_):
    return core.jaxpr_as_fun(jaxpr)(*arrays)


def _by_kernel(*arrays, kernel, settings, **_):
    return kernel(*arrays, **dict(settings))


def _derivative(primals, tangents, **params):
    return jax.jvp(functools.partial(_plain, **params), primals, tuple(map(ad.instantiate_zeros, tangents)))


def _batched(arrays, axes, **params):
    results = jax.vmap(functools.partial(_plain, **params), axes)(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[_CALL] = _derivative
batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, mlir.lower_fun(_plain, multiple_results=True))
mlir.register_lowering(_CALL, mlir.lower_fun(_by_kernel, multiple_results=True), platform="cuda")
