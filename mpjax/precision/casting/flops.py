"""Counts the floating-point operations of an equation, and of a jaxpr by dtype.

Matrix products, convolutions and fused attention are counted. Elementwise operations are not, because memory traffic
bounds them on every GPU that a plan supports. A multiplication and an addition count as two operations.
"""

import collections
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mpjax.precision.casting.jaxprs import manual_axes
from mpjax.precision.casting.walk import Body, bodies
from mpjax.precision.dtypes import is_floating


TENSORFLOAT32 = "tensorfloat32"
ALGORITHMS = {"tf32_tf32_f32": TENSORFLOAT32, "bf16_bf16_f32": "bfloat16"}
"""The dtype that an algorithm of XLA rounds the operands of a product to, unless it keeps theirs."""
_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
"""Matrix products of [T, H] by [H, S] in cuDNN's attention. The backward pass recomputes one (arXiv:2205.14135)."""
_BLOCKS = "float8_blocks_multiplied_out"
"""The inner `jit` that multiplies blocks on platforms without float8 units for blocks; others use float8."""
_COUNTED = {"dot_general", "conv_general_dilated", *_PRODUCTS}


def flops_of(jaxpr: Any, divided: Mapping[str, int] = MappingProxyType({})) -> Mapping[str, int]:
    """Counts the floating-point operations of the products in a jaxpr, by the dtype of their first operand.

    The body of a scan counts once per iteration. The body of a while loop and each branch of a `cond` count once.
    Products of integers do not count. float32 operands count as "tensorfloat32" unless the operation asks for `HIGHEST`
    precision: on a GPU, `HIGH` is TensorFloat-32 too (documentation of `jax.lax.Precision`). If a product names an
    algorithm, the dtype is the one that the algorithm rounds the operands to.

    >>> import jax.numpy as jnp
    >>> flops_of(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)))
    {'bfloat16': 48}

    Args:
      jaxpr: the jaxpr of the whole step, such as `train_step.trace(state, batch).jaxpr`.
      divided: the sizes of mesh axes over which the compiler divides products. Shapes are whole along them, but for
        those inside a `jax.shard_map` over the axis, and each device has its part of the operations.
    """
    total: collections.Counter = collections.Counter()
    for body in bodies(jaxpr):
        times = math.prod(eqn.params["length"] for eqn in body.callers if eqn.primitive.name == "scan")
        manual = {axis for eqn in body.callers if eqn.primitive.name == "shard_map" for axis in manual_axes(eqn.params)}
        parts = math.prod(size for axis, size in divided.items() if axis not in manual)
        for eqn in body.eqns:
            if (operations := product_flops(eqn)) and is_floating(eqn.invars[0].aval):
                total[dtype_in(eqn, body)] += times * operations // parts
    return dict(total)


def dtype_in(eqn: Any, body: Body) -> str:
    """Names the dtype that a product in `body` counts under in `flops_of`, such as "bfloat16" or "tensorfloat32".

    If `body` replaces a float8 product (`stands_in`), it is "float8_e4m3fn".
    """
    return "float8_e4m3fn" if stands_in(body) else _dtype(eqn)


def stands_in(body: Body) -> bool:
    """True for the body that replaces a float8 product on platforms without float8 units for blocks."""
    return any(_BLOCKS in str(caller.params.get("name")) for caller in body.callers)


def product_flops(eqn) -> int:
    """Counts the operations of one run of an equation, of any dtype: two for each multiplication and its addition.

    The count is 0 unless it is a `dot_general`, a convolution or fused attention.
    """
    name = eqn.primitive.name
    if name not in _COUNTED:
        return 0
    first, second = (var.aval.shape for var in eqn.invars[:2])
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(first[axis] for axis in contracted)
    if name == "conv_general_dilated":
        return _convolution(eqn, first, second)
    batch, length, heads, features = first  # BTNH, the layout of jax.nn
    return _PRODUCTS[name] * 2 * batch * heads * length * second[1] * features


def _convolution(eqn, image: tuple[int, ...], kernel: tuple[int, ...]) -> int:
    """Counts the operations of a convolution: two for each product of a kernel value and a pixel of the image.

    Products with padding or with the zeros that dilation inserts between pixels do not count. `image` and `kernel` are
    the shapes of the two operands.
    """
    params, result = eqn.params, eqn.outvars[0].aval.shape
    numbers = params["dimension_numbers"]
    batch, _, *_ = (result[axis] for axis in numbers.out_spec[:2])
    out_features, in_features = (kernel[axis] for axis in numbers.rhs_spec[:2])
    pairs = 1
    for dimension, (low, _) in enumerate(params["padding"]):
        out = result[numbers.out_spec[2 + dimension]]
        taps = kernel[numbers.rhs_spec[2 + dimension]]
        pixels = image[numbers.lhs_spec[2 + dimension]]
        spread = params["lhs_dilation"][dimension]
        at = np.arange(out)[:, None] * params["window_strides"][dimension] - low
        at = at + np.arange(taps)[None, :] * params["rhs_dilation"][dimension]
        pairs *= int(np.count_nonzero((at >= 0) & (at % spread == 0) & (at // spread < pixels)))
    # The batch size is the result's: with batch groups (gradients), each group of outputs sees its part of the batch.
    return 2 * batch * out_features * in_features * pairs


def _dtype(eqn) -> str:
    dtype = str(eqn.invars[0].aval.dtype)
    precision = eqn.params.get("precision")
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return ALGORITHMS.get(precision.name.lower(), dtype)
    requested = precision if isinstance(precision, tuple) else (precision,)
    return TENSORFLOAT32 if dtype == "float32" and jax.lax.Precision.HIGHEST not in requested else dtype
