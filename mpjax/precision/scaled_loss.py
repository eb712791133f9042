"""The loss of a scaled step: what to differentiate, and what to report."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax.errors import PrecisionWarning, UsageError
from mpjax.precision.dtypes import FLOAT16, FLOAT32, is_floating, widest
from mpjax.precision.loss_scale import loss_scale_state


def scale_loss(loss: jax.Array, opt_state) -> jax.Array:
    """The scalar loss times the scale, in float32 whatever the loss's dtype; differentiate this.

    A float16 loss warns once its gradient, which is the scale, can reach 2^16 and so be inf in float16: compute the
    loss in float32.
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
    """Like `jax.value_and_grad` of `fn(params, *args)`, differentiating the scaled loss.

    Returns:
      A function `(opt_state, params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`. The
      loss is unscaled and float32; the gradients are still scaled, in the parameters' dtypes: `tx.update` unscales.
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
