"""Runs a step for a compiler, in its own dtypes, and reads what leaves each module, its products and its casts.

Results that are read are computed in float32 from the same operands and then rounded, so that it is known what rounding
made inf or zero; a product of half-precision operands is exact even in the ten-bit products (TF32) that a GPU computes
float32 ones with.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpjax.diagnosis.arithmetic import (
    casts_down,
    is_half,
    is_opaque,
    narrowed,
    results_of,
    round_to,
    widened,
)
from mpjax.diagnosis.emulate import NO_SOURCE, Emulator, site_of
from mpjax.diagnosis.layers import LayerRecorder, Layers
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.readings import Site
from mpjax.precision.casting.jaxprs import as_function, scope_of
from mpjax.precision.casting.primitives import PRODUCTS, SUMS
from mpjax.precision.casting.values import cast_like
from mpjax.precision.casting.walk import bodies, holds_bodies
from mpjax.precision.dtypes import HALF, is_floating
from mpjax.precision.policy import Policy, get_policy


@dataclasses.dataclass(frozen=True)
class Native(Emulator):
    """Runs operations as they are; those that are read, in float32 and rounded.

    Attributes:
      read: the identities of the equations whose results are read.
    """

    read: frozenset[int] = frozenset()

    def constant(self, var, value, owner: str) -> Pair:
        """An array in the dtype of the variable."""
        value = value.astype(var.aval.dtype) if is_floating(var.aval) else value
        return Pair(value, value)

    def entered(self, var, value, owner: str) -> Pair:
        """An input in the dtype of the variable; its rounding is read."""
        pair = self.constant(var, value, owner)
        if self.recorder is not None and is_floating(var.aval) and var.aval.dtype in HALF:
            site = Site(owner, "forward", "parameter", var.aval.dtype, var.aval.shape, NO_SOURCE)
            self.recorder.observe(site, value, value, pair.low, [])
        return pair

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """The results of an operation, in its own dtypes."""
        arrays = cast_like([pair.low for pair in pairs], [atom.aval for atom in eqn.invars])
        as_traced = as_function(eqn, debug_info)
        if self.recorder is None or id(eqn) not in self.read:
            return [Pair(x, x) for x in as_traced(*arrays)]
        half = any(is_half(var.aval) for var in eqn.outvars)
        if half and not is_opaque(eqn) and eqn.primitive.name not in SUMS | PRODUCTS:
            fast = jax.lax.Precision.DEFAULT  # on a GPU TF32, in which half-precision operands are exact
            exact = results_of(eqn, [widened(x) for x in arrays], debug_info, true_half=False, precision=fast)
            lows = [
                narrowed(round_to(x, var.aval.dtype), var.aval.dtype) if is_half(var.aval) else x
                for x, var in zip(exact, eqn.outvars, strict=True)
            ]
        else:
            exact = lows = as_traced(*arrays)
        for var, x, low in zip(eqn.outvars, exact, lows, strict=True):
            if is_floating(var.aval):
                self.recorder.observe(site_of(eqn, var, place), x, x, low, [])
        return [Pair(x, x) for x in lows]


def telling(jaxpr) -> Iterator:
    """The equations that say something of a layer: what leaves it, its products, its casts to half precision."""
    for body in bodies(jaxpr):
        makers, paths, leaving = {}, {}, []
        for eqn in body.eqns:
            path = scope_of(eqn, body.scope)
            leaving += [var for var in eqn.invars if isinstance(var, core.Var) and paths.get(var, path) != path]
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            paths.update(dict.fromkeys(eqn.outvars, path))
        if body.callers:  # what the program gives are the loss and the gradients
            leaving += [var for var in body.outvars if var in makers]
        telling = {id(eqn): eqn for eqn in body.eqns if casts_down(eqn)}
        for eqn in filter(None, (_origin(var, makers) for var in leaving)):
            telling[id(eqn)] = eqn
        yield from (eqn for eqn in telling.values() if not holds_bodies(eqn))


def _origin(var, makers: dict):
    """The equation where a value comes from that others may only have moved; None if that is not in this body."""
    while (eqn := makers.get(var)) is not None and eqn.primitive.name in _MOVES and not casts_down(eqn):
        var = eqn.invars[0]
    return eqn


_MOVES = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "rev"})


def probe(model, loss_fn: Callable, batch, *, policy: "str | Policy" = "mixed_float16", loss_scale=1.0) -> Layers:
    """The statistics of a Flax NNX model's layers in one training step: forward, backward, and of each gradient.

    Made for `jax.jit` (or `nnx.jit`), in which it costs some four steps; called every hundredth step it is hardly seen:
    `layers = probe(model, loss_fn, batch, loss_scale=...)` inside, `layers.by_layer()` outside.

    Args:
      model: an NNX module in the mode it is in; it is left as it is, whatever its own dtypes.
      loss_fn: `loss_fn(model, batch)`, a scalar, or a pair of it and more.
      batch: a pytree of arrays.
      policy: under which the step is taken, float32 included.
      loss_scale: what the loss is multiplied by before it is differentiated, a number or an array.
    """
    return _probed(program_of_model(model, loss_fn, batch, get_policy(policy)), loss_scale)


def probe_function(
    loss_fn: Callable, params, batch, *, policy: "str | Policy" = "mixed_float16", loss_scale=1.0
) -> Layers:
    """As `probe`, for `loss_fn(params, batch)`, a function of pytrees under autocast, by its named scopes."""
    return _probed(program_of_function(loss_fn, params, batch, get_policy(policy)), loss_scale)


def read_step(program: Program, scale, recorder: LayerRecorder) -> dict:
    """Runs a step, for a trace, and has its layers and its gradients recorded.

    Args:
      program: the step.
      scale: the loss scale.
      recorder: takes the statistics.

    Returns:
      The gradients, scaled, by parameter.
    """
    run = Native(reference=False, recorder=recorder, read=frozenset(map(id, telling(program.jaxpr))))
    _, *pairs = run.run(program.jaxpr, [*program.inputs, jnp.asarray(scale, jnp.float32)], program.owners)
    gradients = {name: pair.low for name, pair in zip(program.gradients, pairs, strict=True)}
    for name, gradient in gradients.items():
        recorder.add(_site(name, "gradient", gradient), gradient / jnp.asarray(scale, gradient.dtype))
    return gradients


def read_updates(recorder: LayerRecorder, updates: Mapping, before: Mapping, after: Mapping) -> None:
    """Records updates by parameter; what leaves a parameter as it was counts as underflow."""
    for name, update in updates.items():
        recorder.add(_site(name, "update", update), update, underflow=(update != 0) & (after[name] == before[name]))


def _probed(program: Program, scale) -> Layers:
    recorder = LayerRecorder()
    read_step(program, scale, recorder)
    return recorder.layers()


def _site(name: str, direction: str, values) -> Site:
    return Site(name, direction, "parameter", np.dtype(values.dtype), values.shape, "(no source line)")
