"""Products of half-precision arrays with results in float32. GPUs and TPUs add in float32 anyway."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.precision.dtypes import FLOAT32


@dataclasses.dataclass(frozen=True)
class InFloat32:
    """A product of two arrays with a result in float32. Its derivatives are products in the dtype of the arrays."""

    product: Callable

    def __call__(self, x: jax.Array, kernel: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Multiplies `x` by `kernel`; the result is in float32, or in the dtype of wider operands."""
        if jnp.result_type(x, kernel).itemsize >= FLOAT32.itemsize:
            return self.product(x, kernel, *args, **kwargs)

        product = functools.partial(self.product, **kwargs)

        @jax.custom_jvp
        def in_float32(x, kernel):
            # A CPU has no product of this kind. XLA widens the operands, but not after it has rewritten the product.
            x, kernel = jax.lax.optimization_barrier((x, kernel))
            return product(x, kernel, *args, preferred_element_type=FLOAT32)

        @in_float32.defjvp
        def _(primals, tangents):
            (x, kernel), (dx, dkernel) = primals, tangents
            change = product(dx, kernel, *args) + product(x, dkernel, *args)
            return in_float32(x, kernel), change.astype(FLOAT32)

        return in_float32(x, kernel)


DOT_GENERAL = InFloat32(jax.lax.dot_general)
CONVOLUTION = InFloat32(jax.lax.conv_general_dilated)
