"""The table of JAX primitives by kind: products, sums, moves of elements, comparisons, calls, control flow.

The dtypes of primitives under autocast are in `operations.py`.
"""

from collections.abc import Callable, Mapping

import numpy as np


MATRIX_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})

SUMS = frozenset({"reduce_sum", "reduce_window_sum", "cumsum", "scatter-add", "scatter-sub"})
"""Primitives that round after each of many additions. Only the device itself reproduces its rounding."""

PRODUCTS = frozenset({"reduce_prod", "cumprod", "integer_pow", "scatter-mul"}) | frozenset(
    {"logistic", "exp2", "expm1", "asin", "acos", "asinh", "atanh", "atan2", "log2", "one_minus_square", "polynomial"}
)
"""Primitives that round after each of many multiplications. Only the device itself reproduces its rounding.

XLA builds functions such as `logistic` from several operations, and each of them rounds: in bfloat16 the logistic of 6
is 1.
"""

CASTS = frozenset({"convert_element_type", "reduce_precision"})

ARRANGES = frozenset(
    {
        *("broadcast_in_dim", "copy", "copy_p", "expand_dims", "reshape", "rev", "squeeze", "stop_gradient"),
        *("sharding_constraint", "transpose"),
    }
)
"""Primitives whose results contain all elements of their operand."""

TAKES = frozenset({"dynamic_slice", "gather", "slice", "split"})
"""Primitives whose results are elements of their first operand."""

CHOOSES = frozenset(
    {
        *("all_gather", "all_gather_invariant", "all_to_all", "clamp", "concatenate", "cummax", "cummin"),
        *("dynamic_update_slice", "max", "min", "pad", "pmax", "pmin", "ppermute", "reduce_max", "reduce_min"),
        *("reduce_window_max", "reduce_window_min", "scatter", "scatter-max", "scatter-min", "select_n", "sort"),
    }
)
"""Primitives whose results are elements of several operands, or of several positions of one operand."""

SCALES = frozenset({"mul", "div"})

COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

FUNCTIONS = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "integer_pow", "sqrt", "rsqrt", "cbrt"),
        *("sin", "cos", "tan", "tanh", "erf", "erf_inv"),
    }
)
"""Functions of single elements that are more than one multiplication or addition."""

REPEATS: Mapping[str, int] = {
    **dict.fromkeys(("broadcast_in_dim", "gather", "tile", "pvary", "pcast"), 0),
    "pad": 1,
}
"""The position of the operand that a primitive may repeat, also on other devices: its derivative sums."""

STRETCH = frozenset(
    {
        *("add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "polynomial"),
        *("igamma", "igammac", "polygamma", "zeta", "regularized_incomplete_beta"),
    }
)
"""Primitives that broadcast scalars and axes of size 1 by themselves: their derivatives sum."""

SCATTERED_SUMS = frozenset({"scatter-add", "scatter-sub", "select_and_scatter_add"})

SCATTERED_PICKS = frozenset({"scatter-max", "scatter-min"})

PICKS = SCATTERED_PICKS | {"reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min"}
"""Primitives that pick values of their operands: their derivatives count equal values, or add where windows overlap."""

ADDING = SCATTERED_SUMS | {"reduce_window_sum", "cumsum", "cumlogsumexp", "psum", "psum_invariant", "reduce_scatter"}
"""Primitives that add in the dtype of their operand. `reduce_sum` is not among them: `jnp.sum` widens before it."""

DERIVED = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Calls with a derivative rule of their own."""

KERNEL_CALL = "kernel_call"
"""The call of `mpjax.models.kernel_calls`: a GPU runs a kernel in place of its body."""

CALLS = DERIVED | {KERNEL_CALL, "jit", "remat2", "checkpoint", "closed_call", "core_call", "eval_jaxpr", "call"}
"""Primitives that mean the same as their body; see `called` in `walk.py`."""

CONTROL_FLOW = frozenset({"scan", "while", "cond"})

ENTERED = CALLS | CONTROL_FLOW | {"shard_map"}
"""Primitives without a dtype of their own. Kernels and scatters are excluded: their bodies mean something else."""


def plain(function: Callable) -> Callable:
    """Adapts `function` to the signature `(parameters, *arrays)`; the parameters are ignored."""
    return lambda params, *arrays: function(*arrays)


ELEMENTWISE: Mapping[str, Callable] = {
    **{name: plain(getattr(np, name)) for name in ("sign", "floor", "ceil", "square")},
    "neg": plain(np.negative),
    "abs": plain(np.abs),
    "add": plain(np.add),
    "sub": plain(np.subtract),
    "mul": plain(np.multiply),
    "max": plain(np.maximum),
    "min": plain(np.minimum),
}
"""Primitives that round at most once, as NumPy functions of `(parameters, *arrays)`. The bits equal XLA's."""
