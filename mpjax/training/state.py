"""TrainState: everything that training changes, as one value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.precision.check import check_dtypes
from mpjax.precision.dtypes import FLOAT32, widest
from mpjax.training.structure import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes.

    Attributes:
      step: int32, steps applied; what schedules count. A skipped step does not advance it.
      attempts: int32, steps attempted; which batch comes next. Always advances.
      params: parameters by path, in the policy's `param_dtype`.
      stats: batch statistics by path, float32.
      opt_state: the optimizer's state, the loss scale in it.
      ema: moving average of the parameters by path, float32; empty if not kept.
      key: random key (typed, scalar) of the next step. Always advances.
    """

    step: jax.Array
    attempts: jax.Array
    params: Arrays
    stats: Arrays
    opt_state: Any
    ema: Arrays
    key: jax.Array


def create_state(
    params: Arrays, stats: Arrays, tx: optax.GradientTransformation, key: jax.Array, *, ema: bool = False
) -> TrainState:
    """The state before the first step. Pure: run it under `jit`, or `jax.eval_shape` for its shapes.

    Raises:
      DtypeError: batch statistics that are not float32 (float64 for float64 parameters).
    """
    check_dtypes(stats, _at_least_float32(params), name="batch statistics")
    zero = jnp.zeros((), jnp.int32)
    averaged = jax.tree.map(lambda p: p.astype(widest(p.dtype, FLOAT32)), params) if ema else {}
    return TrainState(zero, zero, params, stats, tx.init(params), averaged, key)


def _at_least_float32(params: Arrays):
    return widest(FLOAT32, *(p.dtype for p in params.values()))
