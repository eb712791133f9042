"""Adds the gradients of a half-precision array that is read many times in float32, without reading a float32 copy."""

import jax


@jax.custom_jvp
def adding_to(wide: jax.Array, array: jax.Array) -> jax.Array:
    """Returns `array`, whose gradient is added to that of `wide`, which no computation reads.

    >>> import jax.numpy as jnp
    >>> def read(x):
    ...     wide, array = x.astype(jnp.float32), jax.lax.stop_gradient(x)
    ...     return sum(adding_to(wide, array).astype(jnp.float32) for _ in range(300))
    >>> float(jax.grad(read)(jnp.bfloat16(1)))
    300.0

    Args:
      wide: the array in float32.
      array: the array in half precision, without a derivative of its own.
    """
    del wide
    return array


@adding_to.defjvp
def _(primals, tangents):
    return adding_to(*primals), tangents[0].astype(primals[1].dtype)
