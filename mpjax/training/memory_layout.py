"""Lays gradients of convolutions out in memory like their parameters, before their cast to float32.

On GPUs these gradients have the output channels first. An update that transposes cannot write in place, so XLA would
copy parameters and moments after it. The transpose here reads and writes half precision, at half the bytes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core

from mpjax.precision.casting.jaxprs import closed, opened
from mpjax.precision.dtypes import HALF


def row_major(gradient: jax.Array) -> jax.Array:
    """Makes XLA keep an array of four axes, such as a convolution's gradient, in row-major order in memory.

    The values do not change. Arrays with another number of axes are returned as they are.

    Attention kernels of a stack have four axes too; their loop already yields row-major gradients.
    """
    if gradient.ndim != 4:
        return gradient
    return jax.lax.optimization_barrier(with_layout_constraint(gradient, Layout((0, 1, 2, 3))))


def row_major_before_casts(function: Callable, select: Callable[[Any], Any]) -> Callable:
    """Wraps a function to apply `row_major` to selected results.

    If a result is a cast from half precision to a wider dtype, `row_major` applies before this cast, so that the
    transpose moves fewer bytes. Dtypes and values of the results do not change.

    Args:
      function: the function, whose arguments and results are pytrees of arrays.
      select: maps the result to a pytree of the selected leaves. It is called with integers in place of arrays.
    """

    def laid_out(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves, treedef = jax.tree.flatten(shapes)
        numbered = jax.tree.unflatten(treedef, range(len(leaves)))
        indices = [index for index in jax.tree.leaves(select(numbered)) if len(leaves[index].shape) == 4]
        body, consts = opened(program)
        casts = {equation.outvars[0]: equation.invars[0] for equation in body.eqns if _widens(equation)}
        results = list(body.outvars)
        for index in indices:
            results[index] = casts.get(results[index], results[index])
        narrow = closed(body.replace(outvars=results), consts)
        outputs = core.jaxpr_as_fun(narrow)(*jax.tree.leaves(args))
        for index in indices:
            outputs[index] = row_major(outputs[index]).astype(leaves[index].dtype)
        return jax.tree.unflatten(treedef, outputs)

    return laid_out


def _widens(equation: Any) -> bool:
    return equation.primitive.name == "convert_element_type" and equation.invars[0].aval.dtype in HALF
