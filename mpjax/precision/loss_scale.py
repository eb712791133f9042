"""Loss scaling as optax wrappers: the scale is optimizer state, and a step that overflows changes nothing else.

Method: Micikevicius et al., "Mixed Precision Training", 2017 (arXiv:1710.03740), section 3.2. The dynamic scale follows
NVIDIA Apex and torch.amp.GradScaler; it grows after exactly `growth_interval` good steps.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from mpjax.errors import UsageError
from mpjax.precision.scale_state import LossScaleState, states_in
from mpjax.precision.scaled_loss import unscaled
from mpjax.precision.skip_step import Attempt, one_optimizer, select, several_optimizers, with_counts


Optimizers = optax.GradientTransformation | Mapping[str, optax.GradientTransformation]


def dynamic_loss_scaling(
    inner: Optimizers,
    *,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    tolerance: float = 0.0,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with a dynamic loss scale: unscales gradients in float32 and skips steps that overflow.

    >>> import jax.numpy as jnp, mpjax, optax
    >>> tx = mpjax.dynamic_loss_scaling(optax.sgd(0.1))
    >>> _, state = tx.update(jnp.float32("inf"), tx.init(jnp.float32(1)))
    >>> float(state.scale), int(state.skipped)
    (16384.0, 1)

    Put clipping, weight decay and `optax.MultiSteps` inside. On a skipped step the updates are exactly zero and the
    inner state keeps every bit. With `optax.MultiSteps` inside, an overflow in any micro-batch discards the whole
    window, and the scale changes only between windows.

    Several optimizers share a scale if given by name, `{"generator": optax.adam(1e-4), "critic": optax.adam(4e-4)}`.
    Parameters and gradients are then mappings with the same names. An overflow in one optimizer's gradients skips only
    that optimizer, and the scale shrinks once. With `optax.MultiSteps` in some of them, the scale changes whenever a
    window closes.

    Args:
      inner: the optimizer (chain), or several by name.
      initial_scale: the scale of the first step.
      growth_interval: the number of consecutive good steps after which the scale grows.
      growth_factor: the factor by which the scale grows.
      backoff_factor: the factor that multiplies the scale on overflow.
      min_scale: the smallest scale.
      max_scale: the largest scale.
      hysteresis: the number of consecutive overflows after which the scale shrinks; each further overflow shrinks it
        again.
      tolerance: the fraction, from 0 up to but not including 1, of the steps since the last change of the scale that
        must overflow before it shrinks, as in fairseq's `--fp16-scale-tolerance`. `hysteresis` applies too.
      axis_name: the mapped axes (`shard_map`, `pmap`) whose devices must agree to skip a step. Not needed under `jit`.

    Returns:
      An optax transformation whose state is a `LossScaleState`. Its updates are not scaled.

    Raises:
      UsageError: a scale or factor is no power of two, another setting is out of its range, or `inner` is an empty
        mapping; at `init`, `inner` already contains a loss scale.
    """
    initial_scale = _power_of_two("initial_scale", initial_scale)
    min_scale, max_scale = _power_of_two("min_scale", min_scale), _power_of_two("max_scale", max_scale)
    growth_factor = _power_of_two("growth_factor", growth_factor)
    backoff_factor = _power_of_two("backoff_factor", backoff_factor)
    growth_interval = _count("growth_interval", growth_interval)
    hysteresis = _count("hysteresis", hysteresis)
    _require(min_scale <= initial_scale <= max_scale, "min_scale <= initial_scale <= max_scale", initial_scale)
    _require(growth_factor > 1, "growth_factor above 1", growth_factor)
    _require(backoff_factor < 1, "backoff_factor below 1", backoff_factor)
    _require(0 <= tolerance < 1, "tolerance from 0 up to, not including, 1", tolerance)

    def adjust(state: LossScaleState, finite: jax.Array) -> LossScaleState:
        good_steps = state.good_steps + 1
        grow = good_steps >= growth_interval
        consecutive_skips = jnp.where(finite, 0, state.consecutive_skips + 1)
        shrink = consecutive_skips >= hysteresis
        inner_state = state.inner_state
        if tolerance:
            # Divides, because rounding breaks the product: in float32 15 / 50 is 0.3, but 50 * 0.3 is more than 15.
            shrink &= inner_state.skipped.astype(jnp.float32) / inner_state.steps.astype(jnp.float32) >= tolerance
            changed = jnp.where(finite, grow, shrink)
            steps, skipped = (jnp.where(changed, 0, count) for count in (inner_state.steps, inner_state.skipped))
            inner_state = inner_state._replace(steps=steps, skipped=skipped)
        # The bounds apply after the product, so that even 2^127 * 16 = inf becomes max_scale.
        grown = jnp.where(grow, jnp.minimum(state.scale * growth_factor, max_scale), state.scale)
        shrunk = jnp.where(shrink, jnp.maximum(state.scale * backoff_factor, min_scale), state.scale)
        return state._replace(
            scale=jnp.where(finite, grown, shrunk),
            good_steps=jnp.where(finite & ~grow, good_steps, 0),
            skipped=jnp.where(finite, state.skipped, state.skipped + 1),
            consecutive_skips=consecutive_skips,
            inner_state=inner_state,
        )

    attempt = with_counts(_attempt(inner)) if tolerance else _attempt(inner)
    return _loss_scaling(attempt, initial_scale, adjust, axis_name)


def static_loss_scaling(
    inner: Optimizers, scale: float, *, axis_name: str | tuple[str, ...] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer like `dynamic_loss_scaling`, but the scale never changes; an overflow still skips the step.

    Raises:
      UsageError: `scale` is not a power of two; at `init`, `inner` already contains a loss scale.
    """
    scale = _power_of_two("scale", scale)

    def adjust(state: LossScaleState, finite: jax.Array) -> LossScaleState:
        return state._replace(
            good_steps=jnp.where(finite, state.good_steps + 1, 0),
            skipped=jnp.where(finite, state.skipped, state.skipped + 1),
            consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
        )

    return _loss_scaling(_attempt(inner), scale, adjust, axis_name)


def no_loss_scaling(inner: Optimizers) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, or several by name, in a `LossScaleState` with scale 1 that never changes.

    No step is checked, counted or skipped: gradients that are not finite reach the optimizer, and `finite` stays True.
    Gradients are not cast to float32 either.
    """
    attempt = _attempt(inner)

    def init(params) -> LossScaleState:
        return _initial_state(1.0, attempt.init(params))

    def update(updates, state, params=None, **extra):
        updates, inner_state = attempt.unconditionally(updates, state.inner_state, params, extra)
        return updates, state._replace(inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _attempt(inner: Optimizers) -> Attempt:
    if not isinstance(inner, Mapping):
        return one_optimizer(inner)
    _require(len(inner) > 0, "an optimizer, or several by name", "none")
    return several_optimizers({name: one_optimizer(tx) for name, tx in inner.items()})


def _loss_scaling(attempt: Attempt, initial_scale, adjust, axis_name) -> optax.GradientTransformationExtraArgs:
    def init(params) -> LossScaleState:
        inner_state = attempt.init(params)
        return _initial_state(initial_scale, inner_state)

    def update(updates, state, params=None, **extra):
        gradients = unscaled(updates, state.scale)
        step = attempt.where_finite(gradients, state.finite, state.inner_state, params, extra, axis_name)
        after = state._replace(finite=step.finite, inner_state=step.state)
        return step.updates, select(step.closes_window, adjust(after, step.window_finite), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _initial_state(scale: float, inner_state) -> LossScaleState:
    _require(not states_in(inner_state), "one wrapper around an optimizer", "a second inside, which scales twice")
    # Three arrays, not one used three times: a state is donated, and a buffer can be donated only once.
    good_steps, skipped, consecutive_skips = (jnp.zeros((), jnp.int32) for _ in range(3))
    return LossScaleState(
        jnp.asarray(scale, jnp.float32), good_steps, skipped, consecutive_skips, jnp.asarray(True), inner_state
    )


def _power_of_two(name: str, value: float) -> float:
    normal = 2.0**-126 <= value <= 2.0**127
    _require(normal and math.frexp(value)[0] == 0.5, f"{name} a power of two from 2^-126 to 2^127", value)
    return float(value)


def _count(name: str, value: int) -> int:
    _require(1 <= value < 2**31 and int(value) == value, f"{name} a whole number from 1 to 2^31 - 1", value)
    return int(value)


def _require(condition: bool, wanted: str, got) -> None:
    if not condition:
        raise UsageError(f"loss scaling: wanted {wanted}, got {got}")
