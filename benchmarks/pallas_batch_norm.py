"""Compares, compiled for an H200, batch norm + residual sum + ReLU as XLA fuses them with the same as Pallas kernels.

    PYTHONPATH=. python benchmarks/pallas_batch_norm.py

Both programs compute the result and all gradients, in bfloat16 with float32 statistics. Nothing is run: bytes and
kernels are counted in the compiled programs. One "pass" is a reading or writing of one array of activations.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import SingleDeviceSharding

from mpjax.models import normalize
from mpjax.plan import GPUS, absent_devices, parse, target_text, traffic_of


SHAPE = (256, 56, 56, 256)
"""The activations of ResNet-50's first stage at batch 256."""

EPSILON = 1e-5
ROWS = SHAPE[0] * SHAPE[1] * SHAPE[2]
BLOCK = 256, 64


def as_xla_fuses(x, residual, gain, bias):
    rows = gain.reshape(1, 1, 1, -1), bias.reshape(1, 1, 1, -1)
    y, _, _ = normalize((EPSILON, None, False), x.astype(jnp.float32), *rows)
    return jax.nn.relu(y.astype(x.dtype) + residual)


def _forward(x, residual, mean, gain, bias, y):
    normed = (x[...].astype(jnp.float32) - mean[...]) * gain[...] + bias[...]
    y[...] = jnp.maximum(normed.astype(y.dtype) + residual[...], 0)


def _sums(dy, x, y, mean, of_bias, of_gain):
    gradient = jnp.where(y[...] > 0, dy[...].astype(jnp.float32), 0.0)
    of_bias[...] = jnp.sum(gradient, 0, keepdims=True)
    of_gain[...] = jnp.sum(gradient * (x[...].astype(jnp.float32) - mean[...]), 0, keepdims=True)


def _backward(dy, x, y, mean, gain, slope, offset, dx, dresidual):
    gradient = jnp.where(y[...] > 0, dy[...].astype(jnp.float32), 0.0)
    centred = x[...].astype(jnp.float32) - mean[...]
    dx[...] = (gradient * gain[...] + centred * slope[...] + offset[...]).astype(dx.dtype)
    dresidual[...] = gradient.astype(dresidual.dtype)


def _call(kernel, arrays: int, vectors: int, out_shape: Any, out_specs: Any):
    rows = pl.BlockSpec(BLOCK, lambda i, j: (i, j))
    vector = pl.BlockSpec((1, BLOCK[1]), lambda i, j: (0, j))
    return pl.pallas_call(
        kernel,
        grid=(ROWS // BLOCK[0], SHAPE[3] // BLOCK[1]),
        in_specs=[rows] * arrays + [vector] * vectors,
        out_specs=jax.tree.map(lambda whole: rows if whole else pl.BlockSpec((1, BLOCK[1]), rows.index_map), out_specs),
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4),
    )


@jax.custom_vjp
def as_pallas(x, residual, gain, bias):
    return _with_residuals(x, residual, gain, bias)[0]


def _with_residuals(x, residual, gain, bias):
    flat = x.reshape(ROWS, -1)
    mean, square = (
        jnp.mean(v, 0, keepdims=True) for v in (flat.astype(jnp.float32), jnp.square(flat.astype(jnp.float32)))
    )
    inverse = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + EPSILON)
    forward = _call(_forward, 2, 3, jax.ShapeDtypeStruct(flat.shape, x.dtype), True)
    y = forward(flat, residual.reshape(flat.shape), mean, inverse * gain[None], bias[None])
    return y.reshape(x.shape), (flat, y, mean, inverse, gain)


def _gradients(kept, dy):
    x, y, mean, inverse, gain = kept
    flat = dy.reshape(x.shape)
    partial = jax.ShapeDtypeStruct((ROWS // BLOCK[0], SHAPE[3]), jnp.float32)
    sums = _call(_sums, 3, 1, [partial] * 2, [False] * 2)(flat, x, y, mean)
    of_bias, of_gain = (jnp.sum(part, 0, keepdims=True) for part in sums)
    scale = inverse * gain[None]
    slope, offset = -scale * jnp.square(inverse) * of_gain / ROWS, -scale * of_bias / ROWS
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    dx, dresidual = _call(_backward, 3, 4, [like] * 2, [True] * 2)(flat, x, y, mean, scale, slope, offset)
    return dx.reshape(SHAPE), dresidual.reshape(SHAPE), (of_gain * inverse)[0], of_bias[0]


as_pallas.defvjp(_with_residuals, _gradients)


def main() -> None:
    sharding = SingleDeviceSharding(absent_devices("1x1x1", target_text(GPUS["h200"]))[0])
    array = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=sharding)
    vector = jax.ShapeDtypeStruct(SHAPE[3:], jnp.float32, sharding=sharding)

    def both(block, x, residual, gain, bias, dy):
        y, pull = jax.vjp(block, x, residual, gain, bias)
        return y, pull(dy)

    for name, block in {"XLA": as_xla_fuses, "Pallas": as_pallas}.items():
        compiled = jax.jit(functools.partial(both, block)).lower(array, array, vector, vector, array).compile()
        traffic = traffic_of(parse(compiled.as_text() or ""))
        passes = traffic.bytes / (2 * ROWS * SHAPE[3])
        print(f"{name}: {traffic.bytes / 1e9:.3f} GB, {passes:.2f} passes, {traffic.kernels} kernels")


if __name__ == "__main__":
    main()
