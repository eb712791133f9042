"""Statistics of the layers of one step, inside a compiled program: activations, cotangents, gradients, updates."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from mpjax.diagnosis.layers import LayerRecorder, Layers
from mpjax.diagnosis.native import Native, telling
from mpjax.diagnosis.program import Program, program_of_function, program_of_model
from mpjax.diagnosis.readings import Site
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


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
