"""Blocks of one structure as the body of one loop: their part of a program does not grow with their number.

Parameters stay those of the single blocks: checkpoints, pretrained weights, rules and optimizers see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision.calls import Scope, unwrap


def through(blocks: Sequence[Any], x: jax.Array, *args: Any, scan: bool) -> jax.Array:
    """Applies `x = block(x, *args)` for each block, with `scan` as one loop (`jax.lax.scan`) over stacked parameters.

    Args:
      blocks: callable NNX modules; with `scan` equal in all but their arrays.
      x: the input of the first block.
      *args: further arguments of each block.
      scan: whether to compile one loop instead of each block.

    Raises:
      UsageError: with `scan`, blocks differ, or a block's output has another shape or dtype than its input.
    """
    if not scan or len(blocks) < 2:
        for block in blocks:
            x = block(x, *args)
        return x
    parts = [nnx.split(_unnamed(block), nnx.Param, ...) for block in blocks]
    graph = parts[0][0]
    if different := [number for number, part in enumerate(parts) if part[0] != graph]:
        raise UsageError(
            f"scan_blocks: block {different[0]} differs from block 0, in structure, in precision or in its division "
            "over devices, and a loop has one body: write rules that hold for all blocks, or --model.no_scan_blocks"
        )

    def body(x: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
        block = nnx.merge(graph, *arrays, copy=True)
        y = block(x, *args)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise UsageError(
                f"scan_blocks: a block makes {y.dtype}{list(y.shape)} of {x.dtype}{list(x.shape)}, and a loop needs "
                "the same before and after: write --model.no_scan_blocks"
            )
        return y, nnx.split(block, nnx.Param, ...)[2]

    stacked = jax.tree.map(lambda *each: jnp.stack(each), *(part[1:] for part in parts))
    with jax.named_scope("blocks"):
        x, changed = jax.lax.scan(body, x, stacked, length=len(blocks))
    for number, block in enumerate(blocks):
        nnx.update(block, jax.tree.map(lambda each, number=number: each[number], changed))
    return x


def _unnamed(block: nnx.Module) -> nnx.Module:
    """Returns a shallow copy without the named scope of its path, in which blocks differ."""
    copied = object.__new__(type(block))
    vars(copied).update(vars(block))
    unwrap(copied, Scope)
    return copied
