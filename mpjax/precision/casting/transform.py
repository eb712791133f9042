"""Per-operation casting of any JAX function: traced at the caller's dtypes, then run again with casts in between.

The semantics are torch.amp's, by lists of primitives (`operations.py`): matrix products and convolutions in the
policy's compute dtype; what loses range or precision in float32; everything else in the widest of its inputs.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.casting.equinox_paths import equinox_scopes
from mpjax.precision.casting.interpreter import FULL_PRECISION, Interpreter
from mpjax.precision.casting.model_arguments import ModelArguments, take_models_apart
from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.values import arrays_of, cast_like, split_arrays, values_of
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import FLOAT32, FLOAT64, HALF
from mpjax.precision.policy import Policy, get_policy
from mpjax.precision.rules import NORM, Rules, decide, scope_lineage, winner


def autocast(
    fn: Callable, policy: "str | Policy", *, operations: Operations = OPERATIONS, scopes: Iterable[str] = ()
) -> Callable:
    """`fn` with casts placed per operation; composes with JAX's transformations and control flow, inside and outside.

    Parameters and inputs stay as they are and are cast at each use, so that gradients arrive in the parameters' dtypes:
    differentiate the result (`jax.grad(autocast(loss_fn, policy))`), for a gradient taken inside leaves in half. Values
    leave `fn` in the dtype their last operation gave them. Each call traces `fn` anew: call it inside a `jax.jit`.

    NNX modules may be among the arguments: what a call changes in them, as batch statistics, is changed in them.

    Rules of the policy are for named scopes (`jax.named_scope`): those of NNX and Equinox modules among the arguments
    are their paths; Flax linen, Haiku and Equinox open their own. A rule of float32 computes all in its scopes in
    float32, one of float16 or bfloat16 the products.

    Args:
      fn: any function of pytrees; their arrays are traced, other leaves are passed on as they are.
      policy: a `Policy` or what `get_policy` takes; its `compute_dtype` and its rules count. Where neither is half
        precision there is nothing to cast, and `fn` itself is returned.
      operations: which primitive runs in which dtype.
      scopes: scopes that a rule may name though not every call opens them, as of dropout in evaluation.

    Returns:
      A function of the same signature. It raises UsageError when a rule matches no scope.

    Raises:
      UsageError: a rule for a type, which scopes do not have, or for float64.
    """
    policy = get_policy(policy)
    rules = _rules_for_scopes(policy)
    if not {policy.compute_dtype, *rules.values()} & set(HALF):
        return fn

    @functools.cache
    def dtype_of(scope: str) -> np.dtype:
        pattern = winner(rules, scope_lineage(scope))
        return rules[pattern] if pattern else policy.compute_dtype

    known = frozenset(scopes)
    interpreter = Interpreter(dtype_of if rules else lambda scope: policy.compute_dtype, operations)

    @functools.wraps(fn, updated=())
    def autocast_fn(*args, **kwargs):
        models, arrays, of_arrays = _pure(fn, args, kwargs)
        jaxpr, (result, changed) = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        if rules:
            decide(rules, map(scope_lineage, known | models.paths() | {scope for scope, _ in equations(jaxpr)}))
        outputs = arrays_of(interpreter.run(jaxpr, values_of(arrays)))
        split = len(jax.tree.leaves(result))
        # What a model carries from call to call keeps its dtypes.
        kept = cast_like(outputs[split:], jax.tree.leaves(changed))
        models.write_back(jax.tree.unflatten(jax.tree.structure(changed), kept))
        return jax.tree.unflatten(jax.tree.structure(result), outputs[:split])

    return autocast_fn


def _pure(fn: Callable, args: tuple, kwargs: dict) -> tuple[ModelArguments, list[jax.Array], Callable]:
    """A call's models, its arrays, and it as a function of the arrays to its result and to what changed in models."""
    models = take_models_apart((fn, args, kwargs))
    arrays, with_arrays = split_arrays(models.tree)

    def of_arrays(*arrays):
        (fn, args, kwargs), changed = models.join(with_arrays(arrays))
        with equinox_scopes((fn, args, kwargs)):
            return fn(*args, **kwargs), changed()

    return models, arrays, of_arrays


def _rules_for_scopes(policy: Policy) -> Rules:
    """The compute dtype of each rule, checked to be one that a scope can have."""
    dtypes = {}
    for pattern, value in policy.rules.items():
        dtype = value.compute_dtype if isinstance(value, Policy) else value
        if pattern.lower() == NORM and dtype == FLOAT32:
            continue  # as the lists have it
        if pattern.startswith("type:"):
            raise UsageError(
                f"rule '{pattern}': autocast sees named scopes, which have no type; write a path, or apply_policy the "
                "model instead. Norms are computed in float32 by the lists of operations"
            )
        if dtype == FLOAT64:
            raise UsageError(f"rule '{pattern}': autocast computes in float16, bfloat16 or float32, not in float64")
        dtypes[pattern] = dtype
    return Rules(dtypes)


def full_precision(fn: Callable) -> Callable:
    """A region that autocast leaves alone: `fn` gets its inputs in the dtypes they have without autocast.

    Outside autocast it is as `fn`, compiled anew at each call unless inside a `jit`.
    """

    @functools.wraps(fn, updated=())
    def full_precision_fn(*args, **kwargs):
        models, arrays, region = _pure(fn, args, kwargs)
        region.__name__ = FULL_PRECISION
        result, changed = jax.jit(region)(*arrays)
        models.write_back(changed)
        return result

    return full_precision_fn
