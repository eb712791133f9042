"""Measures a step inside its compiled program: the outputs, matrix products and casts of each module.

The step runs in its own dtypes. A result to read is computed in float32 from the same operands and then rounded, which
shows the values that rounding turned into inf or zero. On a GPU, float32 products may use TF32, with ten bits, which is
still exact for half-precision operands.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.extend import core

from mpjax.diagnosis.arithmetic import (
    as_float32,
    casts_down,
    in_half_dtype,
    is_half,
    is_opaque,
    results_of,
    round_to,
)
from mpjax.diagnosis.emulate import Emulator
from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.layers import LayerRecorder, Layers
from mpjax.diagnosis.pairs import Pair, Place
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.sites import parameter_site, site_of
from mpjax.precision.casting.jaxprs import as_function, scope_of
from mpjax.precision.casting.primitives import ARRANGES, PRODUCTS, SUMS
from mpjax.precision.casting.values import cast_like
from mpjax.precision.casting.walk import bodies, holds_bodies
from mpjax.precision.dtypes import is_floating
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


@dataclasses.dataclass(frozen=True)
class Native(Emulator):
    """Runs operations in their own dtypes. The results to measure are computed in float32 and rounded.

    Sums, kernels, and functions of several multiplications (`SUMS`, `PRODUCTS`) run in their own dtypes even if they
    are measured: overflow and underflow in their own rounding are not counted.

    Attributes:
      read: the `id` of each equation whose results are measured.
    """

    read: frozenset[int] = frozenset()

    def constant(self, var, value, owner: str) -> Pair:
        """Makes the pair of an array, cast to the dtype of the variable. Integers are unchanged."""
        value = value.astype(var.aval.dtype) if is_floating(var.aval) else value
        return Pair(value, value)

    def entered(self, var, value, owner: str) -> Pair:
        """Makes the pair of an input, cast to the dtype of `var`, and records its rounding to half precision."""
        pair = self.constant(var, value, owner)
        if self.recorder is not None and is_floating(var.aval) and var.aval.dtype in NARROW:
            site = parameter_site(owner, "forward", var.aval)
            self.recorder.observe(site, value, value, pair.low, [])
        return pair

    def applied(self, eqn, pairs: list[Pair], place: Place, debug_info) -> list[Pair]:
        """Computes the results of an operation in its own dtypes, and records statistics if its `id` is in `read`."""
        arrays = cast_like([pair.low for pair in pairs], [atom.aval for atom in eqn.invars])
        as_traced = as_function(eqn, debug_info)
        if self.recorder is None or id(eqn) not in self.read:
            return [Pair(x, x) for x in as_traced(*arrays)]
        half = any(is_half(var.aval) for var in eqn.outvars)
        if half and not is_opaque(eqn) and eqn.primitive.name not in SUMS | PRODUCTS:
            fast = jax.lax.Precision.DEFAULT  # TF32 on a GPU, which represents half-precision operands exactly
            exact = results_of(eqn, [as_float32(x) for x in arrays], debug_info, true_half=False, precision=fast)
            lows = [
                in_half_dtype(round_to(x, var.aval.dtype), var.aval.dtype) if is_half(var.aval) else x
                for x, var in zip(exact, eqn.outvars, strict=True)
            ]
        else:
            exact = lows = as_traced(*arrays)
        for var, x, low in zip(eqn.outvars, exact, lows, strict=True):
            if is_floating(var.aval):
                self.recorder.observe(site_of(eqn, var, place), x, x, low, [])
        return [Pair(x, x) for x in lows]


def telling(jaxpr) -> Iterator:
    """Yields the equations to measure: module outputs, matrix products, and casts to half precision or float8.

    A module output is a value that another module reads. For a value that is only moved or cast, such as by a reshape,
    it is the equation that computed the value. Bodies of control flow and calls are searched too. The outputs of the
    whole program are not measured.
    """
    for body in bodies(jaxpr):
        makers, paths, leaving = {}, {}, []
        for eqn in body.eqns:
            path = scope_of(eqn, body.scope)
            leaving += [var for var in eqn.invars if isinstance(var, core.Var) and paths.get(var, path) != path]
            makers.update(dict.fromkeys(eqn.outvars, eqn))
            paths.update(dict.fromkeys(eqn.outvars, path))
        if body.callers:  # excludes the outputs of the whole program: the loss and the gradients
            leaving += body.outvars
        telling = {id(eqn): eqn for eqn in body.eqns if casts_down(eqn)}
        for eqn in filter(None, (_origin(atom, makers) for atom in leaving)):
            telling[id(eqn)] = eqn
        yield from (eqn for eqn in telling.values() if not holds_bodies(eqn))


def _origin(atom, makers: dict):
    """The equation that computed a value, skipping moves; None for a literal or a value from outside the body."""
    while not isinstance(atom, core.Literal):
        eqn = makers.get(atom)
        if eqn is None or eqn.primitive.name not in _MOVES or casts_down(eqn):
            return eqn
        atom = eqn.invars[0]
    return None


_MOVES = ARRANGES | {"convert_element_type"}


def probe(model, loss_fn: Callable, batch, *, policy: "str | Policy" = "mixed_float16", loss_scale=1.0) -> Layers:
    """Measures the activations, cotangents and gradients of a Flax NNX model in one training step, by layer.

    Call it inside `jax.jit` or `nnx.jit`, and `by_layer` on the result outside. It costs about four steps, which is
    negligible every hundredth step.

    Args:
      model: an NNX module, used in its current mode; it is not changed.
      loss_fn: `loss_fn(model, batch)`, which returns a scalar, or a pair whose first item is the scalar.
      batch: a pytree of arrays.
      policy: the policy of the step; it overrides the model's own dtypes and may be float32.
      loss_scale: the factor that multiplies the loss before differentiation, a number or an array.

    Returns:
      A `Layers`, a pytree of arrays that a jitted function may return. Its method `by_layer` fetches readable rows.

    Raises:
      UsageError: the policy is unknown, or `apply_policy` refuses it for the model; the model is not an NNX module; or
        the loss is not a floating scalar.
    """
    return _probed(program_of_model(model, loss_fn, batch, get_policy(policy)), loss_scale)


def probe_function(
    loss_fn: Callable, params, batch, *, policy: "str | Policy" = "mixed_float16", loss_scale=1.0
) -> Layers:
    """Measures `loss_fn(params, batch)` like `probe`, under autocast. The layers are named scopes.

    The loss is differentiated with respect to the floating arrays of `params`, a pytree.
    """
    return _probed(program_of_function(loss_fn, params, batch, get_policy(policy)), loss_scale)


def read_step(program: Program, scale, recorder: LayerRecorder) -> tuple[jax.Array, dict]:
    """Runs a step in its own dtypes, and records statistics of its layers and gradients.

    Args:
      program: the step, traced.
      scale: the loss scale.
      recorder: receives the statistics.

    Returns:
      The loss without the loss scale, and the gradients by parameter path, still multiplied by the loss scale. The
      recorded statistics of gradients are without it.
    """
    emulator = Native(reference=False, recorder=recorder, read=frozenset(map(id, telling(program.jaxpr))))
    loss, *pairs = emulator.run(program.jaxpr, [*program.inputs, jnp.asarray(scale, jnp.float32)], program.owners)
    gradients = {name: pair.low for name, pair in zip(program.gradients, pairs, strict=True)}
    for name, gradient in gradients.items():
        recorder.add(parameter_site(name, "gradient", gradient), gradient / jnp.asarray(scale, gradient.dtype))
    return loss.low / jnp.asarray(scale, loss.low.dtype), gradients


def read_updates(recorder: LayerRecorder, updates: Mapping, before: Mapping, after: Mapping) -> None:
    """Records the update of each parameter. Nonzero values that leave the parameter unchanged count as underflow.

    Args:
      recorder: receives the statistics.
      updates: the updates by path of the parameter.
      before: the parameters before the update, by path.
      after: the parameters after the update, by path.
    """
    for name, update in updates.items():
        unchanged = (update != 0) & (after[name] == before[name])
        recorder.add(parameter_site(name, "update", update), update, underflow=unchanged)


def _probed(program: Program, scale) -> Layers:
    recorder = LayerRecorder()
    read_step(program, scale, recorder)
    return recorder.layers()
