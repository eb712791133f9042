"""The first non-finite value of a training step: in which module, forward or backward."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax.precision.calls import has_call, with_call
from mpjax.precision.dtypes import is_floating
from mpjax.precision.loss_scale import loss_scale_state
from mpjax.training.state import TrainState, step_key
from mpjax.training.structure import Structure, named, uncast


class Fault(NamedTuple):
    """Where a step first went wrong.

    Attributes:
      path: the module's (or parameter's) path.
      direction: "parameters", "forward" or "backward".
      what: one sentence.
    """

    path: str
    direction: str
    what: str


def first_fault(
    model: nnx.Module,
    loss_of: Callable[[nnx.Module], jax.Array],
    *,
    scale: float = 1.0,
    cast: Callable[[Callable], Callable] = uncast,
) -> Fault | None:
    """Runs one step module by module and names the first whose values are not finite.

    Args:
      model: in training mode, its policy applied; it is left as after one call.
      loss_of: the model's scalar loss on the batch in question.
      scale: the loss scale of the backward pass.
      cast: puts casts around the pure loss, as for `make_train_step`.

    Returns:
      The first fault, or None if everything is finite. Backward runs from the loss to the input, so that the first
      fault there is the module latest in forward order whose parameters' gradients are not finite.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    values = named(params)
    if bad := _not_finite(values):
        already = f"it is {_kind(values[bad[0]])} before the step, as are {len(bad)} of {len(values)} parameters"
        return Fault(bad[0], "parameters", already)

    order: list[str] = []

    def watched(params) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """The loss, and of each call's output in turn whether it is finite and whether some of it is nan."""
        watched = nnx.merge(graph, params, rest)
        seen = []
        order.clear()

        def record(path: str, out: object) -> None:
            order.append(path)
            seen.append(_faults(out))

        _watch(watched, record)
        return loss_of(watched), seen

    watched = cast(watched)
    loss, seen = watched(params)
    for path, (finite, nan) in zip(order, seen, strict=True):
        if not finite:
            return Fault(path, "forward", f"the output of {path or 'the model'} is {'nan' if nan else 'inf'}")
    if not _finite(loss):
        return Fault("loss", "forward", f"the loss is {_kind(loss)}, though the model's output is finite")

    gradients = named(jax.grad(lambda params: watched(params)[0].astype(jnp.float32) * scale)(params))
    # A module that is not called as a whole has no place in the order: it comes last.
    turn = {path: len(order) - index for index, path in enumerate(order)}
    bad = _not_finite(gradients)
    if not bad:
        return None
    first = min(bad, key=lambda name: turn.get(_module(name), len(order) + 1))
    what = f"the gradient of {first} is {_kind(gradients[first])} at a loss scale of {scale:g}"
    return Fault(_module(first), "backward", what)


def explain(
    structure: Structure,
    loss_fn: Callable,
    cast: Callable[[Callable], Callable],
    seed: int,
    state: TrainState,
    batch: Mapping[str, jax.Array],
) -> str:
    """Names the first fault of the step that `state` would take on `batch`, in a sentence or two.

    Args:
      structure: the model taken apart.
      loss_fn: `(model, batch, key) -> (loss, metrics)`.
      cast: as given to `make_train_step`.
      seed: as given to `make_train_step`.
      state: the training state.
      batch: the training batch.
    """
    key = step_key(seed, state)
    model = structure.assemble(state.params, state.stats, key)
    model.train()
    scale = float(loss_scale_state(state.opt_state).scale)
    fault = first_fault(model, lambda model: loss_fn(model, batch, key)[0], scale=scale, cast=cast)
    if fault is None:
        return "run again module by module, this step's values are finite: the overflow is in the update or the batch"
    if fault.direction == "parameters":
        return (
            f"first bad layer: no longer known, as the bad step was applied to the parameters ({fault.path}: "
            f"{fault.what}); with --precision.loss_scale 1 such steps are skipped and the layer is named"
        )
    return f"first bad layer: {fault.path} ({fault.direction}): {fault.what}"


def _watch(model: nnx.Module, record: Callable[[str, object], None]) -> None:
    """Calls `record(path, output)` after each call of a module, innermost first."""
    for path, module in nnx.iter_modules(model):
        if has_call(type(module)):
            module.__class__ = _recording(type(module), "/".join(map(str, path)), record)


def _recording(cls: type, path: str, record: Callable[[str, object], None]) -> type:
    def around(call, self, *args, **kwargs):
        out = call(self, *args, **kwargs)
        record(path, out)
        return out

    return with_call(cls, around)


def _not_finite(arrays: Mapping[str, jax.Array]) -> list[str]:
    return [name for name, value in arrays.items() if not _finite(value)]


def _module(parameter: str) -> str:
    return parameter.rpartition("/")[0]


def _arrays(tree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)]


def _faults(tree) -> tuple[jax.Array, jax.Array]:
    """Whether all of a tree is finite, and whether some of it is nan."""
    arrays = _arrays(tree)
    finite = jnp.array([jnp.isfinite(leaf).all() for leaf in arrays]).all()
    return finite, jnp.array([jnp.isnan(leaf).any() for leaf in arrays]).any()


def _finite(tree) -> bool:
    return bool(_faults(tree)[0])


def _kind(tree) -> str:
    return "nan" if _faults(tree)[1] else "inf"
