"""Finds whether the arrays of a program depend on parameters or on the batch, to tell weights from activations.

The modules among the arguments hold the parameters. Without modules, the program shows them: parameters are an argument
that multiplies results of itself and of another argument, like a second layer's weight.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from mpjax.precision.casting.jaxprs import scan_counts
from mpjax.precision.casting.primitives import CALLS
from mpjax.precision.casting.values import Origin, is_array
from mpjax.precision.casting.walk import called, evaluated


Arguments = frozenset[Any]
"""The arguments that an array depends on; each is two keys: which part of the call it is in, and where there."""

CLOSED_OVER = "closed over"
"""Stands for all arrays that a function closes over, in a set of `Arguments`."""

_NONE: Arguments = frozenset()


def origins_of(tree: Any, jaxpr: Any) -> tuple[list[Origin], Origin]:
    """Finds the origin of each array of a call, and the origin of the arrays that the function closes over.

    Arrays of modules, or else of arguments that multiply like weights, are `PARAMETERS`, keys `NUMBERS`, all others
    `BATCH`. Without modules and such arguments all are `UNKNOWN`.

    Args:
      tree: the call, `(state of NNX objects, (function, arguments, keyword arguments))`.
      jaxpr: the program, whose inputs are the arrays of the tree.
    """
    modules = _places_of_modules(tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(path, leaf) for path, leaf in leaves if is_array(leaf)]
    held = [any(path[: len(prefix)] == prefix for prefix in modules) for path, _ in arrays]
    if any(held):
        return [_origin(leaf, of) for (_, leaf), of in zip(arrays, held, strict=True)], Origin.UNKNOWN
    arguments = [path[1:3] for path, _ in arrays]
    parameters = _parameters_among(jaxpr, arguments)
    if not parameters:
        return [Origin.UNKNOWN] * len(arrays), Origin.UNKNOWN
    origins = [_origin(leaf, argument in parameters) for argument, (_, leaf) in zip(arguments, arrays, strict=True)]
    return origins, Origin.PARAMETERS if CLOSED_OVER in parameters else Origin.UNKNOWN


def _origin(leaf: Any, is_parameter: bool) -> Origin:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return Origin.NUMBERS
    return Origin.PARAMETERS if is_parameter else Origin.BATCH


def _places_of_modules(tree: Any) -> list[tuple]:
    """Lists the key paths in a call under which parameters are: the state of NNX objects, and each Equinox module."""
    state = jax.tree_util.SequenceKey(0)
    if "equinox" not in sys.modules:
        return [(state,)]
    import equinox

    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, equinox.Module))
    return [(state,), *(path for path, node in nodes if isinstance(node, equinox.Module))]


def _parameters_among(jaxpr: Any, arguments: Sequence[Any]) -> frozenset[Any]:
    """Finds the arguments that look like parameters: one operand of a product depends on nothing else.

    The other operand must depend on the same argument and at least one more, as the activations of a second layer do.

    Args:
      jaxpr: the program.
      arguments: the argument that each input belongs to.
    """
    products: list[tuple[Arguments, Arguments]] = []
    _followed(jaxpr, [frozenset({argument}) for argument in arguments], products)
    return frozenset(
        argument
        for pair in products
        for operand, other in (pair, pair[::-1])
        for argument in operand
        if len(operand) == 1 and operand < other
    )


def _followed(jaxpr: Any, inputs: Iterable[Arguments], products: list | None) -> list[Arguments]:
    """Finds the arguments that the outputs of a jaxpr depend on.

    Args:
      jaxpr: the program.
      inputs: the arguments that each input depends on.
      products: a list to which it appends, for each product without batch axes, the arguments that each of the two
        operands depends on; None to append nothing.
    """

    def apply(eqn: Any, scope: str, operands: list[Arguments], debug_info: Any) -> list[Arguments]:
        del scope, debug_info
        name, together = eqn.primitive.name, _NONE.union(*operands)
        if name in CALLS and (body := called(eqn)) is not None:
            return _followed(body, operands, products)
        if name == "shard_map":
            return _followed(eqn.params["jaxpr"], operands, products)
        if name == "cond":
            branches = [_followed(body, operands[1:], products) for body in eqn.params["branches"]]
            return [operands[0].union(*arguments) for arguments in zip(*branches, strict=True)]
        if name == "scan":
            return _scanned(eqn, operands, products)
        if name == "while":
            return _repeated(eqn, operands, products)
        if name == "dot_general" and products is not None and not any(eqn.params["dimension_numbers"][1]):
            products.append((operands[0], operands[1]))
        return [together for _ in eqn.outvars]

    return evaluated(jaxpr, inputs, _constant, apply)


def _constant(atom: Any, array: Any) -> Arguments:
    # A scalar is a number of the program, not an array of the user's.
    return _NONE if isinstance(atom, core.Literal) or not getattr(array, "ndim", 0) else frozenset({CLOSED_OVER})


def _scanned(eqn: Any, operands: list[Arguments], products: list | None) -> list[Arguments]:
    consts, carry = scan_counts(eqn.params)
    body, kept, xs = eqn.params["jaxpr"], operands[:consts], operands[consts + carry :]
    carried = _settled(lambda carried: _followed(body, [*kept, *carried, *xs], None), operands[consts : consts + carry])
    outputs = _followed(body, [*kept, *carried, *xs], products)
    return [*carried, *outputs[carry:]]


def _repeated(eqn: Any, operands: list[Arguments], products: list | None) -> list[Arguments]:
    first, params = eqn.params["cond_nconsts"], eqn.params
    body, kept = params["body_jaxpr"], operands[first : first + params["body_nconsts"]]
    initial = operands[first + params["body_nconsts"] :]
    carried = _settled(lambda carried: _followed(body, [*kept, *carried], None), initial)
    _followed(body, [*kept, *carried], products)
    return carried


def _settled(step: Any, carried: list[Arguments]) -> list[Arguments]:
    """Finds the arguments that each carry of a loop depends on after any number of iterations.

    Args:
      step: a function from the arguments of each carry to those after one more iteration.
      carried: the arguments of each carry before the first iteration.
    """
    while True:
        after = [old | new for old, new in zip(carried, step(carried), strict=False)]
        if after == carried:
            return carried
        carried = after
