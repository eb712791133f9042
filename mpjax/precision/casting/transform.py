"""Casts any JAX function per operation: traces it at the caller's dtypes, then runs it again with casts.

The semantics follow torch.amp, with lists of primitives (`operations.py`). Matrix products and convolutions run in the
policy's compute dtype. Operations that lose range or precision run in float32. All other operations run in the widest
dtype of their inputs.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision.casting.interpreter import FULL_PRECISION, Interpreter
from mpjax.precision.casting.model_arguments import ModelArguments, equinox_scopes, take_models_apart
from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.origins import origins_of
from mpjax.precision.casting.values import Origin, arrays_of, cast_like, split_arrays, values_of
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import FLOAT32, FLOAT64, HALF
from mpjax.precision.float8.operations import IN_FLOAT8, TAKEN_OUT, noted, nothing_in_float8
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy
from mpjax.precision.rules import DEFAULTS, NORM, Rules, decide, is_typed, scope_lineage, winner


def autocast(
    fn: Callable,
    policy: "str | Policy",
    *,
    operations: Operations = OPERATIONS,
    scopes: Iterable[str] = (),
    require_float8: bool = False,
) -> Callable:
    """Wraps `fn` so that each of its operations runs in the dtype that the policy and the lists of operations say.

    >>> import jax.numpy as jnp, mpjax
    >>> half = mpjax.autocast(lambda x: (x @ x, jnp.exp(x @ x)), "mixed_float16")
    >>> [str(y.dtype) for y in half(jnp.ones((2, 2)))]
    ['float16', 'float32']

    Composes with JAX's transformations and control flow, inside and outside. Parameters and inputs keep their dtypes
    and are cast at each use, so gradients have the parameters' dtypes. Differentiate the result
    (`jax.grad(autocast(loss_fn, policy))`): a gradient computed inside `fn` is in half precision. Each output has the
    dtype of its last operation. Each call traces `fn` again: call the result inside a `jax.jit`.

    NNX modules may be among the arguments. A call updates their state, such as batch statistics, in place.

    Rules of the policy match named scopes (`jax.named_scope`). NNX and Equinox modules among the arguments open a scope
    for each module path. Flax linen, Haiku and Equinox open scopes of their own. Under a float32 rule, everything in
    the scope is computed in float32. A float16 or bfloat16 rule applies to the products in the scope.

    Args:
      fn: any function of pytrees. Arrays are traced; other leaves are passed on unchanged.
      policy: a `Policy`, or anything that `get_policy` takes. Only its `compute_dtype`, its rules and its recipes are
        used. If no dtype among them is half precision and there is no recipe, `fn` itself is returned.
      operations: the lists that say which primitive runs in which dtype.
      scopes: scopes that a rule may name although not every call opens them, such as dropout in evaluation.
      require_float8: if True, raises UsageError if the policy asks for products in float8 and none is, for example
        because all are too small. By default, warns once (`PrecisionWarning`), unless rules exclude all products.

    Returns:
      A function with the signature of `fn`. It raises UsageError if a rule matches no scope.

    Raises:
      UsageError: a rule is for a type, which scopes do not have, or for float64; or a recipe scales by a history, which
        only layers keep.
    """
    policy = get_policy(policy)
    if kept := [str(recipe) for recipe in policy.recipes if recipe.history]:
        raise UsageError(
            f"autocast has no layers to keep the history of {kept[0]} in: write products=float8, or use apply_policy "
            "(--precision.mode module)"
        )
    rules = _rules_for_scopes(policy)
    if not {policy.compute_dtype, *map(policy.computes, rules.values())} & set(HALF) and not policy.recipes:
        return fn

    @functools.cache
    def rule_of(scope: str) -> Any:
        pattern = winner(rules, scope_lineage(scope))
        return rules[pattern] if pattern else None

    told: list[str] = []

    def tell(message: str) -> None:
        if require_float8:
            raise UsageError(message)
        if not told:
            told.append(message)
            warnings.warn(message, PrecisionWarning, stacklevel=3)

    known = frozenset(scopes)
    interpreter = Interpreter(
        lambda scope: policy.computes(rule_of(scope)), operations, lambda scope: policy.multiplies(rule_of(scope))
    )

    @functools.wraps(fn, updated=())
    def autocast_fn(*args, **kwargs):
        models, arrays, of_arrays = _pure(fn, args, kwargs)
        jaxpr, (result, changed) = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        if rules:
            decide(rules, map(scope_lineage, known | models.paths() | {scope for scope, _ in equations(jaxpr)}))
        inputs, closed_over = values_of(arrays), Origin.UNKNOWN
        if policy.recipes:
            origins, closed_over = origins_of(models.tree, jaxpr)
            inputs = [value._replace(origin=origin) for value, origin in zip(inputs, origins, strict=True)]
        with noted() as products:
            outputs = arrays_of(interpreter._replace(closed_over=closed_over).run(jaxpr, inputs))
        # Without a warning: rules may exclude all products, and a function may have no products.
        silent = policy.products is not None and {*products, TAKEN_OUT} == {TAKEN_OUT} and not require_float8
        if policy.recipes and IN_FLOAT8 not in products and not silent:
            tell(nothing_in_float8(policy.recipes, products))
        split = len(jax.tree.leaves(result))
        # Model state keeps its dtypes from call to call.
        kept = cast_like(outputs[split:], jax.tree.leaves(changed))
        models.write_back(jax.tree.unflatten(jax.tree.structure(changed), kept))
        return jax.tree.unflatten(jax.tree.structure(result), outputs[:split])

    return autocast_fn


def _pure(fn: Callable, args: tuple, kwargs: dict) -> tuple[ModelArguments, list[jax.Array], Callable]:
    """Converts a call `fn(*args, **kwargs)` to a function of its arrays alone.

    Returns:
      The NNX objects of the call, its arrays (the state of these objects first), and the function. The function takes
      such arrays and returns the result of the call and the changed state of the objects, for `write_back`.
    """
    models = take_models_apart((fn, args, kwargs))
    arrays, with_arrays = split_arrays(models.tree)

    def of_arrays(*arrays):
        (fn, args, kwargs), changed = models.join(with_arrays(arrays))
        with equinox_scopes((fn, args, kwargs)):
            return fn(*args, **kwargs), changed()

    return models, arrays, of_arrays


def _rules_for_scopes(policy: Policy) -> Rules:
    """Selects the rules of a policy whose patterns are paths, because a named scope has no type.

    Default rules of presets for types are dropped, and so is `type:norm` in float32: the lists of operations decide
    there. Raises UsageError for any other `type:` rule, and for a rule with float64.
    """
    kept = {}
    for pattern, value in policy.rules.items():
        dtype = policy.computes(value)
        if pattern in DEFAULTS - {NORM} or (pattern.lower() == NORM and dtype == FLOAT32):
            continue  # autocast decides these at each operation
        if is_typed(pattern):
            raise UsageError(
                f"rule '{pattern}': autocast sees named scopes, which have no type; write a path, or use "
                "apply_policy on the model. Norms already compute in float32, by the lists of operations"
            )
        if dtype == FLOAT64:
            raise UsageError(f"rule '{pattern}': autocast computes in float16, bfloat16 or float32, not in float64")
        kept[pattern] = value
    return Rules(kept)


def full_precision(fn: Callable) -> Callable:
    """Wraps `fn` as a region in which autocast adds no casts: inputs get the dtypes that they have without autocast.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.autocast(lambda x: mpjax.full_precision(jnp.matmul)(x, x), "mixed_float16")(jnp.ones((2, 2))).dtype
    dtype('float32')

    Outside autocast the result behaves like `fn`. NNX modules may be among the arguments; a call updates their state.
    Each call runs inside a new `jax.jit`: outside another `jit`, each call compiles again.
    """

    @functools.wraps(fn, updated=())
    def full_precision_fn(*args, **kwargs):
        models, arrays, region = _pure(fn, args, kwargs)
        region.__name__ = FULL_PRECISION
        result, changed = jax.jit(region)(*arrays)
        models.write_back(changed)
        return result

    return full_precision_fn
