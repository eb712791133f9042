"""What each primitive of JAX is to mpjax: a product, a sum, a call, control flow; and NumPy's function of the same.

Which dtype autocast gives a primitive is in `operations.py`.
"""

from collections.abc import Callable, Mapping

import numpy as np


MATRIX_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})

SUMS = frozenset({"reduce_sum", "reduce_window_sum", "cumsum", "scatter-add", "scatter-sub"})
"""They round after each of many additions, which only the device itself does as it does."""

PRODUCTS = frozenset({"reduce_prod", "cumprod", "integer_pow", "scatter-mul"}) | frozenset(
    {"logistic", "exp2", "expm1", "asin", "acos", "asinh", "atanh", "atan2"}
)
"""They round after each of many multiplications, likewise.

The functions are made of several operations by XLA, of which each rounds: in bfloat16 the logistic of 6 is 1.
"""

CALLS = frozenset(
    {
        *("jit", "remat2", "checkpoint", "closed_call", "core_call", "eval_jaxpr", "call"),
        *("custom_jvp_call", "custom_vjp_call"),
    }
)
"""They mean what their body means; see `called` in `walk.py`."""

CONTROL_FLOW = frozenset({"scan", "while", "cond"})

ENTERED = CALLS | CONTROL_FLOW | {"shard_map"}
"""What has no dtype of its own. Kernels are not among them, nor are scatters: their bodies mean something else."""


def plain(function: Callable) -> Callable:
    """Returns `function` of arrays as one of a primitive's parameters and arrays."""
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
"""Primitives that round at most once, as NumPy's functions of `(parameters, *arrays)`: the same bits as XLA's."""
