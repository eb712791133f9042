"""Frozen weights of linear layers in blocks of 8- or 4-bit codes with a scale each, dequantised where they multiply.

`nf4` has 4-bit codes of NormalFloat, the quantiles of a normal distribution (QLoRA: Dettmers et al., 2023,
arXiv:2305.14314, appendix E), and float32 scales, without the paper's second quantisation, that of the scales. `int8`
has even steps from -127 to 127. A block is 64 numbers of a weight that stand side by side; its scale is the largest.

Shapes: S stack of blocks of a model, if any; N blocks of codes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.precision.calls import unwrap, wrap, wrapper_of
from mpjax.precision.dtypes import FLOAT32
from mpjax.precision.layers import changed


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Integer


Kind = Literal["int8", "nf4"]

BLOCK = 64
"""Numbers with one scale."""

SCALES = "kernel_scales"
"""The attribute of a quantised layer with its scales, float32 [*S, N]. Its attribute `kernel` has the codes."""


class Quantised(nnx.Variable):
    """Codes or scales of a weight that is not trained: no parameter, so no optimizer and no gradient finds it."""


def quantise(layer: Any, kind: Kind) -> None:
    """Replaces the kernel of a linear layer by codes and scales, in place, and makes its calls dequantise them."""
    kernel = layer.kernel.get_value()
    shape = kernel.shape[kernel.ndim - axes_of_kernel(layer) :]
    make = functools.partial(_quantised, kind, shape)
    if isinstance(kernel, jax.ShapeDtypeStruct):
        codes, scales = jax.eval_shape(make, kernel)
    else:
        codes, scales = make(kernel)
    layer.kernel = Quantised(codes)
    setattr(layer, SCALES, Quantised(scales))
    wrap(layer, Dequantised(kind, shape, np.dtype(kernel.dtype)))


def kernel_of(layer: Any) -> jax.Array:
    """The kernel of a linear layer, dequantised to float32 if it is quantised."""
    wrapper = wrapper_of(layer, Dequantised)
    return layer.kernel[...] if wrapper is None else wrapper.kernel(layer.kernel[...], getattr(layer, SCALES)[...])


def dtype_of_kernel(layer: Any) -> np.dtype:
    """The dtype of a layer's kernel, or that which a quantised one had."""
    wrapper = wrapper_of(layer, Dequantised)
    return np.dtype(layer.kernel.get_value().dtype) if wrapper is None else wrapper.dtype


def restore(layer: Any) -> None:
    """Gives a quantised layer the float32 kernel that its codes stand for, in place; other layers do not change."""
    if wrapper_of(layer, Dequantised) is not None:
        layer.kernel = nnx.Param(kernel_of(layer))
        delattr(layer, SCALES)
        unwrap(layer, Dequantised)


@dataclasses.dataclass(frozen=True)
class Dequantised:
    """A wrapper that gives a layer its kernel for a call, from codes and scales.

    The backward pass makes the kernel again: it is not kept.

    Attributes:
      kind: the codes.
      shape: the shape of the kernel.
      dtype: the dtype that the kernel had, in which a layer without a dtype of its own computes.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: np.dtype
    depth: ClassVar[int] = 8

    def __call__(self, call, module, inputs, *args, **kwargs):
        """Calls a layer with its kernel in the dtype that it multiplies in."""
        dtype = module.dtype or self.dtype

        def with_kernel(inputs, codes, scales):
            kernel = self.kernel(codes, scales).astype(dtype)
            return call(changed(module, kernel=nnx.Param(kernel)), inputs, *args, **kwargs)

        return jax.checkpoint(with_kernel)(inputs, module.kernel[...], getattr(module, SCALES)[...])

    def kernel(self, codes: Integer[Array, "*S N C"], scales: Float[Array, "*S N"]) -> jax.Array:
        """Computes the kernel, float32 [*S, *shape], from codes and scales."""
        stack, size = scales.shape[:-1], math.prod(self.shape)
        if self.kind == "nf4":
            pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
            values = jnp.asarray(NF4)[pairs.astype(jnp.int32)].reshape(*scales.shape, BLOCK)
        else:
            values = codes.astype(FLOAT32).reshape(*scales.shape, BLOCK) / np.float32(127)
        flat = (values * scales[..., None]).reshape(*stack, -1)
        return flat[..., :size].reshape(*stack, *self.shape)


def _quantised(kind: Kind, shape: tuple[int, ...], kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a kernel [*S, *shape] to the nearest codes; returns them, with as many axes as the kernel, and scales."""
    stack, size = kernel.shape[: kernel.ndim - len(shape)], math.prod(shape)
    flat = kernel.astype(FLOAT32).reshape(*stack, size)
    padded = jnp.pad(flat, [(0, 0)] * len(stack) + [(0, -size % BLOCK)])
    blocks = padded.reshape(*stack, -1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    within = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    if kind == "nf4":
        codes = jnp.searchsorted(jnp.asarray((NF4[1:] + NF4[:-1]) / 2), within).astype(jnp.uint8)
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    else:
        codes = jnp.round(within * 127).astype(jnp.int8)
    # As many axes as before: other code counts them to know a stack.
    ones = (1,) * (len(shape) - 2)
    return codes.reshape(*stack, *ones, *codes.shape[-2:]), scales


def axes_of_kernel(layer: Any) -> int:
    """The number of axes of a linear layer's kernel, without that of a stack of blocks."""
    sizes = (layer.in_features, layer.out_features)
    return sum(1 if isinstance(size, int) else len(size) for size in sizes)


def _normal_float() -> np.ndarray:
    """The 16 numbers of NF4, float32: quantiles of a normal distribution from -1 to 1, with an exact 0."""
    normal, end = statistics.NormalDist(), 1 - 0.5 * (1 / 32 + 1 / 30)

    def quantiles(count: int) -> list[float]:
        return [normal.inv_cdf(end + (0.5 - end) * step / (count - 1)) for step in range(count - 1)]

    numbers = np.array(sorted([*(-x for x in quantiles(8)), 0.0, *quantiles(9)]))
    return (numbers / np.max(np.abs(numbers))).astype(np.float32)


NF4 = _normal_float()
