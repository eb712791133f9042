"""The training step that is diagnosed, as one program: arrays in; scaled loss and scaled gradients by path out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.precision.casting import autocast
from mpjax.precision.casting.jaxprs import equations
from mpjax.precision.check import path_name
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy


class Program(NamedTuple):
    """A step under a policy.

    Attributes:
      jaxpr: from `inputs` and the loss scale to the loss, scaled, and the gradients, scaled.
      inputs: arrays.
      gradients: the parameters' paths, in the order of the gradients.
      paths: module paths that have products or other operations, in program order.
    """

    jaxpr: Any
    inputs: list
    gradients: tuple[str, ...]

    def with_scale(self, scale: float) -> list:
        """The inputs for a loss scale."""
        return [*self.inputs, jnp.float32(scale)]

    @property
    def paths(self) -> tuple[str, ...]:
        """The scopes of its operations, in the order in which they first run."""
        return tuple(dict.fromkeys(path for path, _ in equations(self.jaxpr)))

    def flops(self) -> dict[str, float]:
        """Multiplications and additions of the products, by path; those in a loop count once."""
        counts: dict[str, float] = {}
        for path, eqn in equations(self.jaxpr):
            if (flops := _flops(eqn)) > 0:
                counts[path] = counts.get(path, 0.0) + flops
        return counts


def program_of_model(model, loss_fn: Callable, batch, policy: Policy) -> Program:
    """The step of `loss_fn(model, batch)` for a Flax NNX model, which is left as it is.

    The model is in the mode (training or evaluation) that it is in; its scopes are named by its paths.
    """
    from flax import nnx

    from mpjax.precision.scopes import name_scopes

    model = nnx.clone(model)
    name_scopes(model)
    apply_policy(model, policy)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(params, rest, batch):
        return loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    return _program(loss_of, params, (rest, batch))


def program_of_function(loss_fn: Callable, params, batch, policy: Policy) -> Program:
    """The step of `loss_fn(params, batch)`, a function of pytrees, under autocast."""
    return _program(autocast(loss_fn, policy), params, (batch,))


def _program(loss_of: Callable, params, others: tuple) -> Program:
    leaves, treedef = jax.tree.flatten((params, others))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def step(*inputs):
        *values, scale = inputs
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        params, others = jax.tree.unflatten(treedef, filled)

        def scaled(params):
            loss = jnp.asarray(loss_of(params, *others))
            return loss.astype(widest(loss.dtype, FLOAT32)) * scale

        loss, gradients = jax.value_and_grad(scaled, allow_int=True)(params)
        return loss, [g for g in jax.tree.leaves(gradients) if is_floating(g)]

    inputs = [jnp.asarray(leaves[i]) for i in arrays]
    jaxpr = jax.make_jaxpr(step)(*inputs, jnp.float32(1))
    names = [_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_floating(leaf)]
    return Program(jaxpr, inputs, tuple(names))


def _name(path: tuple) -> str:
    """A parameter's path; without `value`, the attribute in which NNX holds an array."""
    return path_name(path).removesuffix("/value")


def _flops(eqn) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = np.prod([eqn.invars[0].aval.shape[axis] for axis in contracted], dtype=float)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        inner = np.prod(kernel, dtype=float) / kernel[numbers.rhs_spec[0]]
    else:
        return 0.0
    return float(2 * inner * np.prod(eqn.outvars[0].aval.shape, dtype=float))
