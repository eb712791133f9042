"""Per-operation casting of any JAX function: traced at the caller's dtypes, then run again with casts in between.

The semantics are torch.amp's, by lists of primitives (`operations.py`): matrix products and convolutions in the
policy's compute dtype; what loses range or precision in float32; everything else in the widest of its inputs.
"""

import functools
from collections.abc import Callable

import jax

from mpjax.precision.casting.interpreter import FULL_PRECISION, Interpreter
from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.values import arrays_of, is_weak, split_arrays, values_of
from mpjax.precision.dtypes import HALF
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


def autocast(fn: Callable, policy: "str | Policy", *, operations: Operations = OPERATIONS) -> Callable:
    """`fn` with casts placed per operation; composes with JAX's transformations and control flow, inside and outside.

    Parameters and inputs stay as they are and are cast at each use, so that gradients arrive in the parameters' dtypes.
    Values leave `fn` in the dtype their last operation gave them.

    Args:
      fn: any function of pytrees; their arrays are traced, other leaves are passed on as they are.
      policy: a `Policy` or what `get_policy` takes; its `compute_dtype` counts. With float32 or float64 there is
        nothing to cast, and `fn` itself is returned.
      operations: which primitive runs in which dtype.

    Returns:
      A function of the same signature.
    """
    compute_dtype = get_policy(policy).compute_dtype
    if compute_dtype not in HALF:
        return fn

    @functools.wraps(fn)
    def autocast_fn(*args, **kwargs):
        arrays, with_arrays = split_arrays((args, kwargs))

        def of_arrays(*arrays):
            args, kwargs = with_arrays(arrays)
            return fn(*args, **kwargs)

        jaxpr, shape = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        inputs = values_of(arrays, [is_weak(array) for array in arrays])
        outputs = Interpreter(compute_dtype, operations).run(jaxpr, inputs)
        return jax.tree.unflatten(jax.tree.structure(shape), arrays_of(outputs))

    return autocast_fn


def full_precision(fn: Callable) -> Callable:
    """A region that autocast leaves alone: `fn` gets its inputs in the dtypes they have without autocast.

    Outside autocast it is as `fn`, compiled anew at each call unless inside a `jit`.
    """

    @functools.wraps(fn)
    def full_precision_fn(*args, **kwargs):
        arrays, with_arrays = split_arrays((args, kwargs))

        def region(*arrays):
            args, kwargs = with_arrays(arrays)
            return fn(*args, **kwargs)

        region.__name__ = FULL_PRECISION
        return jax.jit(region)(*arrays)

    return full_precision_fn
