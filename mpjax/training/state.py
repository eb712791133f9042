"""TrainState: everything that training changes, as one value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.check import check_dtypes
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.precision.loss_scale import loss_scale_state
from mpjax.training.structure import Arrays


_STEPS = 2**31


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes.

    Random numbers and the order of the data are no state: they are functions of a seed and of `attempts`.

    Attributes:
      step: int32, steps applied; what schedules count. A skipped step does not advance it.
      params: parameters by path, in the policy's `param_dtype`.
      stats: batch statistics by path, float32.
      opt_state: the optimizer's state, the loss scale and the number of skipped steps in it.
      ema: moving average of the parameters by path, float32; empty if not kept.
    """

    step: jax.Array
    params: Arrays
    stats: Arrays
    opt_state: Any
    ema: Arrays

    @property
    def attempts(self) -> jax.Array:
        """int32, steps attempted, applied or skipped: the position in the data. Every step advances it."""
        return self.step + loss_scale_state(self.opt_state).skipped


def step_key(seed: int, state: TrainState) -> jax.Array:
    """The random key of the step that `state` takes next."""
    # Apart from the initial values, which nnx.Rngs draws from fold_in(key(seed), count).
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), state.attempts)


def create_state(params: Arrays, stats: Arrays, tx: optax.GradientTransformation, *, ema: bool = False) -> TrainState:
    """The state before the first step. Pure: run it under `jit`, or `jax.eval_shape` for its shapes.

    Raises:
      DtypeError: batch statistics that are not float32 (float64 for float64 parameters).
    """
    check_dtypes(stats, _at_least_float32(params), name="batch statistics")
    # Copies, not the parameters again: the state is donated, and a buffer can be given away only once.
    averaged = jax.tree.map(lambda p: jnp.array(p, widest(p.dtype, FLOAT32)), params) if ema else {}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        stats=stats,
        opt_state=tx.init(params),
        ema=averaged,
    )


def _at_least_float32(params: Arrays):
    return widest(FLOAT32, *(p.dtype for p in params.values()))
