"""Calls a model on parts of a batch, one after the other, and keeps only the results for the backward pass.

This is gradient caching (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021,
arXiv:2101.06983): the loss is of all results together, its gradients by the results are computed once, and the backward
pass of each part begins with its share of them, after its forward pass has been computed again.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mpjax.precision.dtypes import FLOAT32, is_floating, widest


def in_micro_batches(model: nnx.Module, function: Callable, inputs: Any, count: int) -> Any:
    """Computes `function(model, inputs)`, arrays [B, ...], of `count` equal parts of inputs [B, ...] in a loop.

    The gradients of parameters are added over the parts in float32 or wider. The model's random streams and statistics
    go from each part to the next, in place. Other sizes than multiples of `count`, as of the shapes of one or two
    examples that a program is looked at with, are computed at once: the result is the same.
    """
    size = jax.tree.leaves(inputs)[0].shape[0]
    if count == 1 or size % count:
        return function(model, inputs)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    narrow = jax.tree.map(lambda x: x.dtype, params)
    wide = jax.tree.map(lambda x: x.astype(widest(x.dtype, FLOAT32)) if is_floating(x) else x, params)

    def body(others: Any, part: Any) -> tuple[Any, Any]:
        # The sum over the parts is of the gradients of `wide`, outside of this cast.
        stored = jax.tree.map(lambda x, dtype: x.astype(dtype), wide, narrow)
        called = nnx.merge(graph, stored, others, copy=True)
        result = function(called, part)
        return nnx.split(called, nnx.Param, ...)[2], result

    parts = jax.tree.map(lambda x: x.reshape(count, size // count, *x.shape[1:]), inputs)
    others, results = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), others, parts)
    nnx.update(model, others)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), results)
