"""Multi-head self-attention (Vaswani et al., 2017, arXiv:1706.03762), by cuDNN's fused kernel where there is one.

Shapes: B batch, T positions, D width, N heads, H features of a head.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.errors import UsageError
from mpjax.precision import attention as plain
from mpjax.precision.dtypes import HALF


Implementation = Literal["auto", "xla", "cudnn"]


class Attention(nnx.Module):
    """Queries, keys and values of all heads, attention, and a projection of what the heads found.

    Args:
      width: D, features in and out.
      heads: N, which divides the width.
      is_causal: whether a position attends to those up to its own only.
      implementation: "cudnn" keeps no [T, T] scores in memory; "auto" takes it where `implementation_for` says so.
      kernel_init: initial kernels of queries, keys and values.
      out_init: initial kernel of the projection.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        is_causal: bool = False,
        implementation: Implementation = "auto",
        kernel_init: Callable,
        out_init: Callable,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise UsageError(f"attention of width {width} has no {heads} heads: wanted a number that divides {width}")
        project = functools.partial(nnx.LinearGeneral, width, (heads, width // heads), kernel_init=kernel_init)
        self.query = project(rngs=rngs)
        self.key = project(rngs=rngs)
        self.value = project(rngs=rngs)
        self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), kernel_init=out_init, rngs=rngs)
        self.is_causal = is_causal
        self.implementation: Implementation = implementation

    def __call__(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Features [B, T, D] to as many; of sequence b the positions from `lengths[b]` on are not attended to."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        attention = functools.partial(attend, is_causal=self.is_causal, implementation=self.implementation)
        return self.out(attention(query, key, value, lengths=lengths))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    is_causal: bool = False,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Attention with scores and softmax in float32, whatever the inputs and the device are.

    Args:
      query: [B, T, N, H].
      key: [B, T, N, H].
      value: [B, T, N, H].
      lengths: int32 [B], how many positions of each sequence there are to attend to; one at the least.
      is_causal: whether a position attends to those up to its own only.
      implementation: "auto", "xla" or "cudnn".

    Returns:
      [B, T, N, H] in the dtype of the inputs.

    Raises:
      UsageError: "cudnn" where it cannot run.
    """
    lengths = None if lengths is None else jnp.maximum(lengths, 1)
    if _chosen(implementation, query) == "cudnn":
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=is_causal, key_value_seq_lengths=lengths, implementation="cudnn"
        )
    mask = None
    if lengths is not None:
        positions = jnp.arange(key.shape[1], dtype=lengths.dtype)
        mask = positions[None, None, None, :] < lengths[:, None, None, None]
    return plain.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)


def implementation_for(query: jax.Array, device=None) -> Literal["xla", "cudnn"]:
    """The fastest implementation that can train on queries [B, T, N, H]; `device` is JAX's default unless given."""
    return "xla" if _why_not_cudnn(query, _default_device() if device is None else device) else "cudnn"


def _chosen(implementation: Implementation, query: jax.Array) -> Literal["xla", "cudnn"]:
    if implementation == "auto":
        return implementation_for(query)
    if implementation not in ("xla", "cudnn"):
        raise UsageError(f"attention by '{implementation}': wanted 'auto', 'xla' or 'cudnn'")
    if implementation == "cudnn" and (reason := _why_not_cudnn(query, _default_device())):
        raise UsageError(f"attention by 'cudnn' {reason}; write implementation='auto', which takes 'xla' here")
    return implementation


def _why_not_cudnn(query: jax.Array, device) -> str | None:
    """What keeps cuDNN's fused attention from running forwards and backwards; None where nothing does."""
    *_, length, _, features = query.shape
    if device.platform not in ("gpu", "cuda"):
        return f"needs a GPU, this is a {device.platform}"
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD's is a name, "gfx942"
        return f"needs a GPU of NVIDIA, this is a {device.device_kind}"
    if capability < 8.0:
        return f"needs compute capability 8.0, {device.device_kind} has {capability}"
    if query.dtype not in HALF:
        return f"computes in float16 or bfloat16, not in {query.dtype}"
    if features % 8 or features > 128:
        return f"needs heads of 8, 16, ... or 128 features, got {features}"
    if length % 2:
        return f"needs an even number of positions to train, got {length}"
    return None


def _default_device():
    """Where arrays go that are not told where."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device
