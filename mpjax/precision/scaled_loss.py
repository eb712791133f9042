"""How a loss scale enters a step: scales the loss to differentiate, reports the loss unscaled, unscales gradients."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision.dtypes import FLOAT16, FLOAT32, is_floating, widest
from mpjax.precision.scale_state import loss_scale_state


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Float


def scale_loss(loss: Float[Array, ""], opt_state) -> Float[Array, ""]:
    """Multiplies the loss by the loss scale, in float32 (or wider) for any loss dtype; differentiate the result.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> opt_state = mpjax.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.float32(1))
    >>> mpjax.scale_loss(jnp.bfloat16(0.5), opt_state)
    Array(512., dtype=float32)

    Warns (`PrecisionWarning`) about a float16 loss if the scale is at least 2^16, or unknown while tracing. The
    gradient of the loss is the scale, and 2^16 is inf in float16. Compute the loss in float32 instead.

    Raises:
      UsageError: the loss is not floating, or `opt_state` does not contain exactly one `LossScaleState`.
    """
    scale = loss_scale_state(opt_state).scale
    loss = jnp.asarray(loss)
    if not is_floating(loss):
        raise UsageError(f"the loss is {loss.dtype}, which has no gradient: wanted a floating scalar")
    if loss.dtype == FLOAT16 and (isinstance(scale, Tracer) or scale >= 2.0**16):
        warnings.warn(
            "the loss is float16: a loss scale of 2^16 or more overflows in its gradient, so that such steps are "
            "skipped. Compute the loss in float32, as in logits.astype(jnp.float32)",
            PrecisionWarning,
            stacklevel=2,
        )
    dtype = widest(loss.dtype, FLOAT32)
    return loss.astype(dtype) * scale.astype(dtype)


def scaled_value_and_grad(fn: Callable, has_aux: bool = False) -> Callable:
    """Transforms a loss function like `jax.value_and_grad`, but differentiates the loss times the loss scale.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> opt_state = mpjax.static_loss_scaling(optax.sgd(0.1), 1024.0).init(jnp.float32(1))
    >>> mpjax.scaled_value_and_grad(jnp.square)(opt_state, jnp.float32(3))
    (Array(9., dtype=float32), Array(6144., dtype=float32))

    Args:
      fn: the loss function, `fn(params, *args, **kwargs)`.
      has_aux: if True, `fn` returns `(loss, aux)`.

    Returns:
      A function `(opt_state, params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. The
      loss is unscaled, in float32 (or wider). The gradients, with respect to `params`, are still scaled and have the
      parameters' dtypes; `tx.update` unscales them. It warns and raises like `scale_loss`.
    """

    def scaled(params, opt_state, *args, **kwargs):
        out = fn(params, *args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        loss = jnp.asarray(loss)
        return scale_loss(loss, opt_state), (loss.astype(widest(loss.dtype, FLOAT32)), aux)

    differentiate = jax.value_and_grad(scaled, has_aux=True)

    def value_and_grad(opt_state, params, *args, **kwargs):
        (_, (loss, aux)), grads = differentiate(params, opt_state, *args, **kwargs)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


def unscaled(gradients, scale: Float[Array, ""]):
    """Divides gradients by the loss scale; float16 and bfloat16 gradients become float32 first.

    Leaves that are neither floating nor complex stay unchanged.
    """

    def divided(g):
        if not jnp.issubdtype(g.dtype, jnp.inexact):
            return g
        if jnp.iscomplexobj(g):
            return jax.lax.complex(divided(g.real), divided(g.imag))
        # Divides instead of multiplying by 1/scale: 1/2^127 is subnormal, and devices may flush it to zero.
        dtype = widest(g.dtype, FLOAT32)
        return g.astype(dtype) / scale.astype(dtype)

    return jax.tree.map(divided, gradients)


_COTANGENT: contextvars.ContextVar[Any] = contextvars.ContextVar("_COTANGENT", default=1.0)


@contextlib.contextmanager
def loss_cotangent(value: Float[Array, ""]) -> Iterator[None]:
    """Context in which `expected_cotangent` gives `value`, the factor of the loss's derivative, as the loss scale is.

    Trace the loss inside the `with` block. A loss that computes its own half-precision gradients together with its
    value needs the factor, to know how large they become.
    """
    token = _COTANGENT.set(value)
    try:
        yield
    finally:
        _COTANGENT.reset(token)


def expected_cotangent() -> Float[Array, ""] | float:
    """The factor of the loss's derivative: the value of the innermost `loss_cotangent`, or 1.0 outside of all."""
    return _COTANGENT.get()
