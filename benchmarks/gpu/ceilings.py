"""What the device at hand reaches at best: bytes it moves per second, operations of its matrix units per second."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


DTYPES = {"float32": jnp.float32, "mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
"""Of the operands of a policy's products; float32 as the device multiplies it by default, in TF32 where it can."""


def ceilings(*, small: bool) -> dict:
    """`bandwidth` in bytes/s, read and written, and `matmul` in operations/s by policy; `small` on any machine."""
    side, floats = (256, 2**20) if small else (8192, 2**28)
    return {
        "bandwidth": bandwidth(floats),
        "matmul": {policy: matmul(side, dtype) for policy, dtype in DTYPES.items()},
    }


def bandwidth(floats: int) -> float:
    """Of a pass over an array of float32 far larger than any cache: every value read, changed and written."""
    x = jax.random.normal(jax.random.key(0), (floats,))
    change = jax.jit(lambda x: x * 1.0001, donate_argnums=0)
    return 2 * x.nbytes / seconds(change, x)


def matmul(side: int, dtype) -> float:
    """Of products of two square matrices of random numbers."""
    first, second = (jax.random.normal(key, (side, side), dtype) for key in jax.random.split(jax.random.key(0)))
    # What comes out goes in again: small enough to stay finite.
    second = second / jnp.asarray(side**0.5, dtype)
    product = jax.jit(jnp.matmul, donate_argnums=0)
    return 2 * side**3 / seconds(lambda x: product(x, second), first)


def seconds(change: Callable, x: jax.Array, *, calls: int = 10, repeats: int = 7) -> float:
    """Of one call of `change`, whose result goes in again; the median of repeats."""
    x = jax.block_until_ready(change(change(x)))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            x = change(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
