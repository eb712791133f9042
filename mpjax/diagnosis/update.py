"""Compares the optimizer's updates in half precision and in float32, and finds updates that are lost.

A parameter stored in half precision without a float32 copy does not change if the update is less than half the distance
to the next representable number. Training then stalls (Micikevicius et al., "Mixed Precision Training", 2017,
arXiv:1710.03740, section 3.1). Three wrappers keep small updates, so nothing is checked: `master_weights` in the
float32 copy, `stochastic_weights` in the mean, and `compensated_weights` in a second number.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.diagnosis.finding import Finding
from mpjax.diagnosis.formats import range_of
from mpjax.diagnosis.program import Program
from mpjax.diagnosis.readings import EXPONENTS, Site, ratio
from mpjax.diagnosis.trace import Trace, TraceRow
from mpjax.errors import UsageError
from mpjax.precision.casting.one_equation import NO_SOURCE
from mpjax.precision.dtypes import FLOAT32, HALF, is_floating
from mpjax.precision.half_weights import CompensatedWeightsState, StochasticWeightsState
from mpjax.precision.master import MasterWeightsState
from mpjax.precision.scale_state import loss_scale_state
from mpjax.precision.skip_step import optax_promotion


class UpdateRule(NamedTuple):
    """An optimizer with its parameters and its state, at some step of a run.

    Attributes:
      tx: the optax transformation.
      params: the parameters that it updates, in their stored dtypes.
      state: the state of `tx`.
    """

    tx: optax.GradientTransformation
    params: Any
    state: Any


class Update(NamedTuple):
    """Measurements of the update of one parameter, in half precision and in float32.

    Attributes:
      path: the path of the parameter.
      row: the row of the diagnosis's table.
      size: the sum of squares of the update's finite values.
      lost: the sum of squares of the values that leave the parameter unchanged.
      finite: True if all values of the update are finite.
      wide_size: the sum of squares of the update with everything in float32.
      wide_lost: as `lost`, with everything in float32.
      wide_finite: as `finite`, with everything in float32.
    """

    path: str
    row: TraceRow
    size: float
    lost: float
    finite: bool
    wide_size: float
    wide_lost: float
    wide_finite: bool


def updates_of(program: Program, trace: Trace, scale: float, optimizer: UpdateRule) -> list[Update]:
    """Runs the optimizer in half precision and in float32, and measures the update of each floating parameter.

    Args:
      program: the step.
      trace: the emulated run of the step, which has the gradients.
      scale: the loss scale of the step.
      optimizer: the optimizer that receives the gradients; if it keeps small updates (in master, stochastic or
        compensated weights), the result is empty.
    """
    if _keeps_small_updates(optimizer.state):
        return []
    full = optimizer._replace(params=_float32(optimizer.params), state=_float32(optimizer.state))
    trees = (*_moved(optimizer, trace.low, scale), *_moved(full, trace.wide, scale))
    leaves = [filter(is_floating, jax.tree.leaves(tree)) for tree in trees]
    return [_one(*arguments) for arguments in zip(program.gradients, *leaves, strict=True)]


def lost_update(updates: Sequence[Update], tolerance: float) -> Finding | None:
    """Finds a fault that only the half-precision updates have: one is not finite, or too much of them is lost.

    Too much means more than `tolerance` of the Euclidean norm of all updates together.

    Returns:
      A finding with the verdict "overflow" for the first update that is not finite, or "rounding" for the parameter
      that loses most. None if there is no fault, or if the float32 updates have it too.
    """
    for update in updates:
        if update.wide_finite and not update.finite:
            return Finding(
                "overflow",
                _site(update),
                f"The update of {update.path} is not finite, although its gradient is: the optimizer's state is in "
                f"{update.row.dtype}, like the parameter. With both in float32 the update is finite.",
            )
    fraction = ratio(sum(update.lost for update in updates), sum(update.size for update in updates))
    wide_fraction = ratio(sum(update.wide_lost for update in updates), sum(update.wide_size for update in updates))
    if fraction <= tolerance or wide_fraction > tolerance:
        return None
    worst = max(updates, key=lambda update: update.lost)
    return Finding(
        "rounding",
        _site(worst),
        f"{fraction:.1%} of the norm of the update is lost: it does not change {worst.row.underflow:.1%} of the values "
        f"of {worst.path}, which are stored in {worst.row.dtype}, so their training stalls. In float32 they change.",
    )


def _site(update: Update) -> Site:
    return Site(update.path, "update", "apply_updates", update.row.dtype, (), NO_SOURCE)


def _moved(optimizer: UpdateRule, outputs: Sequence, scale: float) -> tuple[Any, Any, Any]:
    """Runs the optimizer once. Returns the parameters, their updates, and the updated parameters, as pytrees.

    `outputs` has the loss and the gradients of the floating parameters, times `scale`. Other parameters get a gradient
    of zero.
    """
    loss, *gradients = outputs
    value = jnp.asarray(np.asarray(loss, np.float64) / scale, FLOAT32)
    params, treedef = jax.tree.flatten(optimizer.params)
    scaling = _own_scale(optimizer.state)
    remaining = iter(gradients)
    leaves = [
        jnp.asarray(np.asarray(next(remaining), np.float64) / scale * scaling, p.dtype) if is_floating(p) else p * 0
        for p in params
    ]
    gradients = jax.tree.unflatten(treedef, leaves)
    with optax_promotion():
        tx = optax.with_extra_args_support(optimizer.tx)
        update, _ = tx.update(gradients, optimizer.state, optimizer.params, value=value)
        return optimizer.params, update, optax.apply_updates(optimizer.params, update)


def _own_scale(state) -> float:
    """The loss scale by which the optimizer divides gradients; 1 without loss scaling, or with more than one."""
    try:
        return float(loss_scale_state(state).scale)
    except UsageError:  # no loss scaling
        return 1.0


def _one(name: str, param, low, after, full, wide, full_after) -> Update:
    """Measures the update of one parameter.

    Args:
      name: the path of the parameter.
      param: the parameter.
      low: its update in half precision.
      after: the parameter after that update.
      full: the parameter in float32.
      wide: its update in float32.
      full_after: the float32 parameter after that update.
    """
    exact, got, error = (np.asarray(x, np.float64) for x in (wide, low, low.astype(wide.dtype) - wide))
    finite, stalled = np.isfinite(got), np.asarray((low != 0) & (after == param))
    size = np.where(finite, np.abs(got), 0.0)
    broken = _fraction(~finite & np.isfinite(exact))
    nonzero = size[size > 0]
    exponents = np.clip(np.frexp(nonzero)[1] - 1, EXPONENTS.start, EXPONENTS.stop - 1)
    row = TraceRow(
        path=name,
        direction="update",
        dtype=np.dtype(param.dtype),
        largest=float(size.max(initial=0.0)),
        mean=float(size.sum() / max(size.size, 1)),
        overflow=broken,
        underflow=_fraction(stalled),
        subnormal=_fraction((size > 0) & (size < range_of(param.dtype).smallest_normal)),
        error=ratio(float(np.sum(np.square(error[finite]))), float(np.sum(np.square(exact)))),
        own_error=None,
        histogram=tuple(np.bincount(exponents - EXPONENTS.start, minlength=len(EXPONENTS)).tolist()),
        non_finite=broken,
    )
    stays = np.asarray(full_after == full)
    return Update(
        path=name,
        row=row,
        size=float(np.sum(np.square(size))),
        lost=float(np.sum(np.square(size[stalled]))),
        finite=bool(finite.all()),
        wide_size=float(np.sum(np.square(exact))),
        wide_lost=float(np.sum(np.square(exact[stays]))),
        wide_finite=bool(np.isfinite(exact).all()),
    )


def _fraction(flags: np.ndarray) -> float:
    return float(np.mean(flags)) if flags.size else 0.0


def _float32(tree):
    """Casts the half-precision arrays of a pytree to float32."""
    return jax.tree.map(lambda x: x.astype(FLOAT32) if is_floating(x) and x.dtype in HALF else x, tree)


def _keeps_small_updates(state) -> bool:
    """True if an optimizer state contains master, stochastic or compensated weights."""
    kinds = MasterWeightsState, StochasticWeightsState, CompensatedWeightsState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in nodes)
