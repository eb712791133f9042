"""Runs a function that casts by itself, such as a model under a policy, with its sums in float32."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpjax.precision.calls import modules_of
from mpjax.precision.casting.gradient_sums import adds_in_half
from mpjax.precision.casting.interpreter import Interpreter
from mpjax.precision.casting.model_arguments import take_models_apart
from mpjax.precision.casting.operations import SUMS_ALONE
from mpjax.precision.casting.values import arrays_of, cast_like, split_arrays, values_of
from mpjax.precision.dtypes import BFLOAT16
from mpjax.precision.module_tree import attributes


def with_sums_in_float32(fn: Callable) -> Callable:
    """Wraps `fn`, which casts by itself, so that its sums and the sums of its derivatives run in float32.

    >>> import jax, jax.numpy as jnp
    >>> row = lambda x: jnp.sum(x.astype(jnp.bfloat16)[jnp.zeros(5000, int)].astype(jnp.float32))
    >>> [float(jax.grad(each)(jnp.ones(1))[0]) for each in (row, with_sums_in_float32(row))]
    [256.0, 4992.0]

    Products and all other operations run in the dtypes of `fn`. `cumsum`, `psum` and sums of windows are in float32,
    and so are results computed from them. Outputs have the dtypes that `fn` gives them.

    Each call traces `fn`, like `jax.jit`. NumPy arrays among its arguments are traced too. Do not use values that it
    stores outside, as in a list: they may be tracers. `fn` runs unchanged if no sum of many terms is in half precision.
    It also runs unchanged if a trace cannot describe it: it gets an `nnx.Variable` or `nnx.State`, changes a list or a
    dict among its arguments or a module outside them, or returns objects that JAX does not know. NNX modules may be
    among the arguments; all of their state must exist before the call.

    Args:
      fn: a function of pytrees, such as a loss: `jax.grad(with_sums_in_float32(loss_fn))`.
    """

    @functools.wraps(fn, updated=())
    def with_sums(*args, **kwargs):
        if any(map(_is_variable, jax.tree.leaves((args, kwargs), is_leaf=_is_object_or_state))):
            return fn(*args, **kwargs)  # it may set the variable
        models = take_models_apart((fn, args, kwargs), name=False)
        arrays, with_arrays = split_arrays(models.tree)
        kept: list[_Result] = []

        def of_arrays(*arrays):
            (function, args, kwargs), changed = models.join(with_arrays(arrays))
            before = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
            result = _taken_apart(function(*args, **kwargs))
            unchanged = _same(before, jax.tree.flatten((args, kwargs), is_leaf=_is_object))
            kept[:] = [result._replace(known=result.known and unchanged)]
            return result.arrays, changed()

        try:
            jaxpr, (_, changed) = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        except Exception as error:
            if type(error).__name__ == "TraceContextError":  # it changes a module that is not an argument
                return fn(*args, **kwargs)
            raise
        (result,) = kept
        if not (result.known and adds_in_half(jaxpr)):
            return fn(*args, **kwargs)
        shapes = jaxpr.out_avals
        outputs = cast_like(arrays_of(_SUMS.run(jaxpr, values_of(arrays))), shapes)
        split = len(result.arrays)
        models.write_back(jax.tree.unflatten(jax.tree.structure(changed), outputs[split:]))
        return result.filled(outputs[:split])

    return with_sums


_SUMS = Interpreter(lambda scope: BFLOAT16, SUMS_ALONE, chosen_by_author=False)


class _Result(NamedTuple):
    """The result of a function, with its arrays separated from its other leaves.

    Attributes:
      arrays: the arrays.
      leaves: all leaves, with None in place of the arrays.
      positions: the positions of the arrays among the leaves.
      treedef: the tree structure of the leaves.
      known: False if an object in the result may hold arrays, or the function changed its arguments.
    """

    arrays: list[jax.Array]
    leaves: list
    positions: list[int]
    treedef: Any
    known: bool

    def filled(self, arrays: list) -> Any:
        leaves = list(self.leaves)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return jax.tree.unflatten(self.treedef, leaves)


def _taken_apart(result: Any) -> _Result:
    leaves, treedef = jax.tree.flatten(result, is_leaf=_is_object)
    positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    known = all(isinstance(leaf, str | bytes | bool | int | float | complex | None) for leaf in others)
    return _Result([leaves[position] for position in positions], others, positions, treedef, known)


def _is_object(node: Any) -> bool:
    """True for an NNX object or variable, which is taken as one leaf here; False if Flax was not imported."""
    if "flax" not in sys.modules:
        return False
    from flax import nnx

    return isinstance(node, nnx.Pytree | nnx.Variable)


def _is_variable(node: Any) -> bool:
    return _is_object(node) and hasattr(node, "get_value")


def _is_object_or_state(node: Any) -> bool:
    """True for an NNX object or variable, and for an `nnx.State`, a tree of variables."""
    if "flax" not in sys.modules:
        return False
    from flax import nnx

    return isinstance(node, nnx.State) or _is_object(node)


def _same(before: tuple, after: tuple) -> bool:
    (leaves, treedef), (others, other) = before, after
    return treedef == other and all(a is b for a, b in zip(leaves, others, strict=True))


def has_own_code(model: Any) -> bool:
    """True if a module of a model has a class, or holds a function, that is not from JAX, Flax or mpjax.

    A `functools.partial` counts too: a `Sequential` holds Flax's pools, which add in half precision, as partials.
    """
    modules = modules_of(model).values()
    if not all(_is_known(type(module)) for module in modules):
        return True
    held = (value for module in modules for _, value in attributes(module))
    functions = (value for value in held if callable(value) and not isinstance(value, type) and not _is_object(value))
    return any(isinstance(function, functools.partial) or not _is_known(function) for function in functions)


def _is_known(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "").partition(".")[0] in ("jax", "flax", "mpjax")
