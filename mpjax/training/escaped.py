"""Traces programs, and refuses programs that compute with an array of an earlier trace.

JAX traces a function several times: for shapes, for the training step, for the evaluation. An array that one trace
makes and a cache keeps has no value in the next. JAX compiles such a program, with an argument that no caller passes.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax.errors import UsageError
from mpjax.precision.casting.jaxprs import opened


def trace(function: Any, *arguments: Any) -> Any:
    """Traces a jitted function, and returns the `jax.stages.Traced` of `function.trace(*arguments)`.

    The static arguments of the function have to be its Python integers.

    Raises:
      UsageError: the function computes with an array that an earlier trace made. The message says where it was made.
    """
    traced = function.trace(*arguments)
    if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(traced.args_info)):
        static = tuple(index for index, argument in enumerate(arguments) if isinstance(argument, int))
        _, consts = opened(jax.make_jaxpr(function, static_argnums=static)(*arguments))
        for const in consts:
            if isinstance(const, Tracer):
                _refuse(const)
    return traced


def _refuse(array: Tracer) -> None:
    """Raises UsageError if the trace that made `array` has ended."""
    try:
        jnp.negative(array)  # JAX's error says where the array was made
    except jax.errors.UnexpectedTracerError as error:
        line = re.search(r"created on line (\S+ \(.*\))", str(error))
        raise UsageError(
            f"the model or another function keeps an array ({array.aval.str_short()}) from one trace to the next"
            f"{f', made at {line[1]}' if line else ''}; make it at the top of its file, import that file at the top of "
            "yours, or keep the array as an attribute of the model"
        ) from error
