"""The backward pass of layer norm and of the residual connection around it, as one kernel in Pallas' Triton dialect.

Shapes: N rows, D width, P programs, each of which takes several tiles of rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


TILE = 4096
"""Elements of a tile, which a program holds in registers: 16 in each of its threads, of which a warp has 32."""

WARPS = 8

PROGRAMS = 1056
"""The largest number of programs: 8 on each of the 132 multiprocessors of an H100 or H200.

It is the same on all GPUs, so that the sums of the gradients of scale and bias have one order.
"""


def backward(
    x: Float[Array, "N D"],
    dy: Float[Array, "N D"],
    dskip: Float[Array, "N D"],
    scale: Float[Array, " D"],
    mean: Float[Array, " N"],
    variance: Float[Array, " N"],
    *,
    epsilon: float,
    interpret: bool = False,
) -> list[jax.Array]:
    """Computes what `mpjax.models.layer_norm.backward` computes, the gradients of a layer norm, in one pass over x.

    Arguments and results are the same. Each program of the kernel sums the gradients of scale and bias over its rows;
    XLA adds these sums, in their order. With `interpret`, the kernel's operations run one by one, on any device.
    """
    (total, width), padded = x.shape, 1 << (x.shape[1] - 1).bit_length()
    rows = max(1, TILE // padded)
    tiles = -(-total // (rows * PROGRAMS))
    programs = -(-total // (rows * tiles))
    # In a `jax.shard_map`, results vary between devices as x does.
    shape_of = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(x).manual_axis_type)
    vectors = shape_of((programs, width), jnp.float32)
    dx, dscale, dbias = pl.pallas_call(
        functools.partial(_program, epsilon=epsilon, rows=rows, tiles=tiles, padded=padded),
        grid=(programs,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 6,
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        out_shape=[shape_of(x.shape, x.dtype), vectors, vectors],
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="layer_norm_backward",
    )(x, dy, dskip, scale, mean, variance)
    return [dx, jnp.sum(dscale, axis=0), jnp.sum(dbias, axis=0)]


def _program(
    x_ref, dy_ref, dskip_ref, scale_ref, mean_ref, variance_ref, dx_ref, dscale_ref, dbias_ref, **sizes
) -> None:
    """The kernel's program: writes the gradient of x for its tiles of rows, and its sums for scale and bias."""
    epsilon, rows, tiles, padded = (sizes[name] for name in ("epsilon", "rows", "tiles", "padded"))
    (total, width), program = x_ref.shape, pl.program_id(0)
    columns = jnp.arange(padded)
    scale = triton.load(scale_ref.at[columns], mask=columns < width, other=0.0)

    def add_tile(number, sums):
        row = (program * tiles + number) * rows + jnp.arange(rows)
        indices, inside = (row[:, None], columns[None, :]), (row < total)[:, None] & (columns < width)[None, :]

        def load(ref):
            return triton.load(ref.at[indices], mask=inside, other=0.0).astype(jnp.float32)

        def of_rows(ref):
            return triton.load(ref.at[row], mask=row < total, other=0.0)[:, None]

        def mean(values):
            return jnp.sum(values, axis=1, keepdims=True) / width

        dy, variance = load(dy_ref), of_rows(variance_ref)
        inverse = jax.lax.rsqrt(variance + epsilon)
        normalized = jnp.where(inside, (load(x_ref) - of_rows(mean_ref)) * inverse, 0.0)
        slope = dy * scale[None, :]
        along = jnp.where(variance == 0.0, 0.0, mean(slope * normalized))
        dx = (slope - mean(slope) - normalized * along) * inverse + load(dskip_ref)
        triton.store(dx_ref.at[indices], dx.astype(dx_ref.dtype), mask=inside)
        return sums[0] + dy * normalized, sums[1] + dy

    zeros = jnp.zeros((rows, padded), jnp.float32)
    for ref, sums in zip((dscale_ref, dbias_ref), jax.lax.fori_loop(0, tiles, add_tile, (zeros, zeros)), strict=True):
        triton.store(ref.at[program, columns], jnp.sum(sums, axis=0), mask=columns < width)
