"""The learning rate as a function of applied steps: warm-up, then a schedule by name or the user's own."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.config import schema
from mpjax.config.user_calls import parameters_of
from mpjax.config.user_code import Code, load_function
from mpjax.errors import UsageError, first_line
from mpjax.precision.skip_step import optax_promotion


def learning_rate_schedule(config: schema.Optimizer, *, steps: int, warmup: int) -> optax.Schedule:
    """Builds the learning rate as a function of applied steps: linear warm-up to the peak, then `config.schedule`.

    `config.schedule` counts from the end of the warm-up, and is built for the rest of training. `one_cycle`, and a
    function of the user with a parameter `warmup`, contain their own warm-up, and cover all of training.

    Args:
      config: the `optimizer` section.
      steps: the length of training in steps.
      warmup: the steps until the peak; capped at a fifth of training, so that a short trial of a long recipe still
        learns.

    Raises:
      UsageError: the user's own schedule cannot be called, or its value is not a rate of 0 or more.
    """
    peak = config.learning_rate
    warmup = capped_warmup(steps, warmup)
    if config.schedule == "one_cycle":
        return optax.cosine_onecycle_schedule(steps, peak, pct_start=max(warmup, 1) / steps)
    if ":" in (schedule := str(config.schedule)):
        return _own(config.schedule, peak, steps, warmup)
    rest = steps - warmup
    return _after_warmup(
        {
            "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
            "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
            "constant": lambda: optax.constant_schedule(peak),
        }[schedule](),
        peak,
        warmup,
    )


def capped_warmup(steps: int, warmup: int) -> int:
    """Caps the length of the warm-up at a fifth of training, rounded down; both are in steps."""
    return min(warmup, steps // 5)


def _after_warmup(schedule: optax.Schedule, peak: float, warmup: int) -> optax.Schedule:
    if warmup == 0:
        return schedule
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), schedule], [warmup])


_GIVEN = ("peak", "learning_rate", "steps", "warmup")


def _own(spec: Code, peak: float, steps: int, warmup: int) -> optax.Schedule:
    """Builds the user's schedule: calls the function with those of `_GIVEN` that it takes, and checks some rates.

    If it takes no `warmup`, a linear warm-up comes before it. Raises UsageError if it cannot be used.
    """
    flag = "--optimizer.schedule"
    function = load_function(spec, flag=flag)
    parameters = parameters_of(function, f"{flag} {spec}")
    warms_up = "warmup" in parameters
    values = {"peak": peak, "learning_rate": peak, "steps": steps if warms_up else steps - warmup, "warmup": warmup}
    if others := [
        key for key, parameter in parameters.items() if key not in values and parameter.default is parameter.empty
    ]:
        raise UsageError(
            f"{flag} {spec} wants {', '.join(others)}, which mpjax does not know: it fills in {', '.join(_GIVEN)}; "
            "give the others a default"
        )
    result: Any = function(**{key: value for key, value in values.items() if key in parameters})
    if not callable(result):
        raise UsageError(
            f"{flag} {spec} returned {type(result).__name__}: wanted a function from step to learning rate, as "
            "optax's schedules are"
        )
    user_schedule: optax.Schedule = cast(Any, result)
    schedule = user_schedule if warms_up else _after_warmup(user_schedule, peak, warmup)
    _require_rates(f"{flag} {spec}", schedule, sorted({0, 1, warmup, steps // 2, max(0, steps - 1)}))
    return schedule


def _require_rates(name: str, schedule: Callable, steps: list[int]) -> None:
    """Raises UsageError unless a schedule, compiled for an int32 step, gives a finite rate of 0 or more at `steps`."""
    try:
        with optax_promotion():
            shape = jnp.shape(jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32)))
            rates = np.asarray(jax.jit(jax.vmap(schedule))(jnp.array(steps, jnp.int32))) if shape == () else None
    except Exception as error:
        raise UsageError(
            f"{name} cannot be compiled as a function of the step: {first_line(error)}; compute with "
            "jax.numpy (jnp.where, not if), as optax's schedules do"
        ) from error
    if rates is None:
        raise UsageError(f"{name} returned an array of shape {shape} for a step: wanted one number")
    for step, rate in zip(steps, rates, strict=True):
        if not (np.isfinite(rate) and rate >= 0):
            raise UsageError(f"{name} is {rate} at step {step}: wanted a learning rate of 0 or more")
