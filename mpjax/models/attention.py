"""Multi-head self-attention (Vaswani et al., 2017, arXiv:1706.03762), with cuDNN's fused kernel if available.

Shapes: B batch, T positions, D width, N heads, K key and value heads, H features per head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mpjax.errors import UsageError
from mpjax.mesh_axes import CONTEXT, FSDP, TENSOR
from mpjax.models.devices import why_not_on
from mpjax.models.projections import called, project
from mpjax.models.residual import with_cast_bias
from mpjax.precision import attention as plain
from mpjax.precision.dtypes import HALF, default_device


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float, Int


Implementation = Literal["auto", "xla", "cudnn"]


class Attend(Protocol):
    """A function of attention with the parameters of `attend`, which is one of them."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segments: jax.Array | None = None,
        is_causal: bool = False,
        window: int | jax.Array | None = None,
        scale: float | None = None,
        cap: float | None = None,
        implementation: Implementation = "auto",
    ) -> jax.Array:
        """Computes the mixed values of each query, [B, T, N, H]."""
        ...


class Attention(nnx.Module):
    """Query, key and value projections, attention, and an output projection.

    Args:
      width: D, the number of input and output features.
      heads: N, a divisor of the width.
      is_causal: whether a position attends only to itself and earlier positions.
      implementation: "xla", or "cudnn", which keeps no [T, T] scores in memory; "auto" uses "cudnn" if
        `implementation_for` chooses it.
      kernel_init: the initializer of the query, key and value kernels.
      out_init: the initializer of the output projection's kernel.
      unbiased: the names of projections, of "query", "key" and "value", that have no bias.

    Raises:
      UsageError: `heads` does not divide the width.
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
        unbiased: Collection[str] = (),
        rngs: nnx.Rngs,
    ):
        if width % heads:
            fitting = next(count for count in range(min(heads, width), 0, -1) if width % count == 0)
            raise UsageError(
                f"attention of width {width} cannot have {heads} heads: wanted a divisor of {width}; "
                f"write --model.heads {fitting}",
                repair={"model.heads": fitting},
            )
        project = functools.partial(nnx.LinearGeneral, width, (heads, width // heads), kernel_init=kernel_init)
        self.query = project(use_bias="query" not in unbiased, rngs=rngs)
        self.key = project(use_bias="key" not in unbiased, rngs=rngs)
        self.value = project(use_bias="value" not in unbiased, rngs=rngs)
        self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), kernel_init=out_init, rngs=rngs)
        self.is_causal = is_causal
        self.implementation: Implementation = implementation

    def __call__(
        self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None = None, attends: Attend | None = None
    ) -> Float[Array, "B T D"]:
        """Maps features to features; no position attends to those of sequence b from `lengths[b]` on (None: to all).

        `attends` takes the place of `attend`.
        """
        # `project` adds a constant to the bias of `out`: the compiler would sum it over the devices that divide the
        # heads. Where parameters are gathered, its stacked kernels would be kept from the forward to the backward pass.
        projected = called if any(map(_is_divided, (TENSOR, FSDP, CONTEXT))) else project
        query, key, value, out = projected(x, self.query, self.key, self.value, self.out)
        attention = functools.partial(attends or attend, is_causal=self.is_causal, implementation=self.implementation)
        return with_cast_bias(out)(attention(query, key, value, lengths=lengths))


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    lengths: Int[Array, " B"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    is_causal: bool = False,
    window: int | jax.Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T N H"]:
    """Computes attention with scores and softmax in float32, whatever the input dtype and the device.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H], where N is a multiple of K.
      value: [B, T, K, H].
      lengths: int32 [B], the number of positions of each sequence to attend to; 0 is treated as 1. None: all.
      segments: int32 [B, T], a number for each position; a position attends only to those with its own number. None:
        to all. cuDNN gets the mask as numbers that it adds to the scores, [B, 1, T, T] in the dtype of the inputs: in
        float16 -32768, which has to be below the scores.
      is_causal: whether a position attends only to itself and earlier positions.
      window: a position attends to itself and those less than this many away, of which a causal one sees those before
        it; an int, or an int32 scalar, with which "auto" is "xla" for causal attention. None: all. cuDNN gets a window
        on both sides as a mask, as for `segments`.
      scale: the factor of the scores; None: 1 / sqrt(H).
      cap: the limit of the scores (`mpjax.precision.attention.soft_cap`), with which "auto" is "xla"; None: no limit.
      implementation: "xla", "cudnn", or "auto" for "cudnn" where it can train with these arguments, else "xla".

    Returns:
      [B, T, N, H] in the dtype of the inputs.

    Raises:
      UsageError: the implementation is unknown, or it is "cudnn" and cuDNN cannot run here.
    """
    if isinstance(window, int) and window >= query.shape[1]:
        window = None
    lengths = None if lengths is None else jnp.maximum(lengths, 1)
    if _chosen(implementation, query, is_causal=is_causal, window=window, cap=cap) == "cudnn":
        # cuDNN trains with even numbers of positions. To the one that is added, no other attends: it is behind all
        # lengths, or later than the causal ones.
        if (length := query.shape[1]) % 2:
            query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
            segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, 1)), mode="edge")
            if lengths is None and (segments is not None or not is_causal):
                lengths = jnp.full(query.shape[0], length, jnp.int32)
        fused = functools.partial(
            jax.nn.dot_product_attention, is_causal=is_causal, scale=scale, implementation="cudnn"
        )
        if segments is not None or (window is not None and not is_causal):
            # cuDNN has no window beside a mask, and none to the right: the mask has the window and the lengths too.
            mask = _mask(key.shape[1], lengths, window, segments, is_causal=is_causal)
            mask = jnp.broadcast_to(mask, (len(query), 1, query.shape[1], key.shape[1]))
            return _on_own_heads(fused)(query, key, value, None, mask)[:, :length]
        options = {} if window is None else {"local_window_size": (window - 1, 0)}
        return _on_own_heads(functools.partial(fused, **options))(query, key, value, lengths, None)[:, :length]
    mask = _mask(key.shape[1], lengths, window, segments, is_causal=is_causal)
    return plain.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale, cap=cap)


def _mask(
    length: int,
    lengths: jax.Array | None,
    window: int | jax.Array | None,
    segments: jax.Array | None,
    *,
    is_causal: bool,
) -> Any:
    """True where a position may attend to another, broadcastable to [B, N, T, T]; None where all may to all.

    Without the causal mask itself: a causal window only hides what is too far before a position.
    """
    masks = []
    positions = jnp.arange(length, dtype=jnp.int32)
    if lengths is not None:
        masks.append(positions[None, None, None, :] < lengths[:, None, None, None])
    if window is not None:
        masks.append((positions[None, :] > positions[:, None] - window)[None, None])
        if not is_causal:
            masks.append((positions[None, :] < positions[:, None] + window)[None, None])
    if segments is not None:
        masks.append(segments[:, None, :, None] == segments[:, None, None, :])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _on_own_heads(attention: Callable) -> Callable:
    """Wraps cuDNN's attention as `(query, key, value, lengths, mask) -> result`; each device runs its own heads.

    Inside a `jax.shard_map` over other axes of a mesh, the compiler cannot divide a call of cuDNN, so a second
    `jax.shard_map` divides the heads over the axis `tensor`. Elsewhere the wrapper only passes the arguments on.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def call(query, key, value, lengths, mask):
        return attention(query, key, value, mask=mask, key_value_seq_lengths=lengths)

    if not _is_divided(TENSOR) or TENSOR in mesh.manual_axes or not mesh.manual_axes:
        return call
    heads, whole = PartitionSpec(None, None, TENSOR), PartitionSpec()
    return jax.shard_map(
        call, in_specs=(heads, heads, heads, whole, whole), out_specs=heads, axis_names={TENSOR}, check_vma=False
    )


def _is_divided(axis: str) -> bool:
    """True if the current abstract mesh has several devices along `axis`; False without a mesh or without the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get(axis, 1) > 1


def implementation_for(query: jax.Array, device=None) -> Literal["xla", "cudnn"]:
    """Chooses "cudnn" if cuDNN can train with queries [B, T, N, H] on `device` (None: JAX's default), else "xla".

    Reads only the shape and the dtype of `query`. cuDNN needs half precision and an H of at most 128 that 8 divides, on
    an NVIDIA GPU of compute capability 8.0 or more.
    """
    return "xla" if _why_not_cudnn(query, default_device() if device is None else device) else "cudnn"


def _chosen(
    implementation: Implementation, query: jax.Array, *, is_causal: bool, window: Any, cap: float | None
) -> Literal["xla", "cudnn"]:
    """Resolves "auto"; raises UsageError for an unknown name, or for "cudnn" where cuDNN cannot run."""
    if implementation not in ("auto", "xla", "cudnn"):
        raise UsageError(f"unknown attention implementation '{implementation}': wanted 'auto', 'xla' or 'cudnn'")
    if implementation == "xla":
        return "xla"
    reason = _why_no_kernel(window if is_causal else None, cap) or _why_not_cudnn(query, default_device())
    if implementation == "cudnn" and reason:
        raise UsageError(f"attention with 'cudnn' {reason}; write implementation='auto', which uses 'xla' here")
    return "xla" if reason else "cudnn"


def _why_no_kernel(window: Any, cap: float | None) -> str | None:
    """The reason why cuDNN has no kernel for attention of this kind, on any device; None if it has one.

    `window` is that of causal attention; a mask has any other.
    """
    if cap is not None:
        return "does not cap scores"
    if not isinstance(window, int | None):
        return "needs a window that is known at trace time"
    return None


def _why_not_cudnn(query: jax.Array, device) -> str | None:
    """The reason why cuDNN's fused attention cannot train with these queries on `device`; None if it can."""
    features = query.shape[-1]
    if reason := why_not_on(device):
        return reason
    if query.dtype not in HALF:
        return f"computes in float16 or bfloat16, not in {query.dtype}"
    if features % 8 or features > 128:
        return f"needs heads of 8, 16, ... or 128 features, got {features}"
    return None
