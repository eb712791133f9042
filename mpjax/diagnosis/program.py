"""Traces a training step into one program, from arrays to the scaled loss and the scaled gradients."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.diagnosis.compile_ahead import brought_here
from mpjax.diagnosis.constants import Constants, constants_of
from mpjax.diagnosis.formats import NARROW
from mpjax.diagnosis.progress import SILENT, Progress
from mpjax.errors import UsageError
from mpjax.precision.calls import name_scopes
from mpjax.precision.casting.flops import product_flops
from mpjax.precision.casting.one_equation import source_of
from mpjax.precision.casting.transform import autocast
from mpjax.precision.casting.values import is_array, split_arrays
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import FLOAT32, is_floating, path_name, widest
from mpjax.precision.modules import apply_policy, ruled_modules
from mpjax.precision.policy import Policy
from mpjax.precision.rules import without_class
from mpjax.precision.scaled_loss import loss_cotangent


class Program(NamedTuple):
    """A training step under a policy, traced into a jaxpr.

    Attributes:
      jaxpr: the closed jaxpr, from `inputs` and the loss scale to the scaled loss and the scaled gradients.
      inputs: the input arrays. Parameters that the policy stores in half precision have their values from before the
        cast.
      gradients: the paths of the differentiated parameters, in the order of the gradients.
      owners: the module path of each parameter, in the order of the inputs. Parameters are the first inputs, so it is
        shorter than `inputs`.
      names: the names of the inputs: "parameter layers/0/kernel", "batch/image".
      modules: the module paths that a rule of the policy can apply to, in program order.
      progress: receives the progress of a run.
      constants: the float32 values of the program's constants; empty until `beside`.
    """

    jaxpr: Any
    inputs: list
    gradients: tuple[str, ...]
    owners: tuple[str, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    progress: Progress = SILENT
    constants: Constants = Constants()

    def at(self, scale: float) -> tuple[Any, list, tuple[str, ...], Progress, Mapping]:
        """The arguments of `Emulator.run` for a loss scale, in order. The scale is the last input of the jaxpr."""
        return self.jaxpr, [*self.inputs, jnp.float32(scale)], self.owners, self.progress, self.constants.exact

    def parameter(self, index: int) -> str:
        """The path of the parameter of gradient `index`, counted from 0, for messages; "the parameter" if empty."""
        return self.gradients[index] or "the parameter"

    def beside(self, full: "Program") -> "Program":
        """Copies the program with the float32 values of its constants, from `full`, the step traced in float32."""
        return self._replace(constants=constants_of(self.jaxpr, full.jaxpr))

    @property
    def is_random(self) -> bool:
        """True if the step has an operation on random keys, `random_*`, such as drawing numbers."""
        return any(eqn.primitive.name.startswith("random_") for _, eqn in equations(self.jaxpr))

    def flops(self) -> dict[str, int]:
        """Counts the FLOPs of matrix products, convolutions and fused attention, by path.

        Paths without any are missing. Padding is not counted. The body of a loop counts once, and every branch of a
        conditional counts.
        """
        counts: dict[str, int] = {}
        for path, eqn in equations(self.jaxpr):
            if flops := product_flops(eqn):
                counts[path] = counts.get(path, 0) + flops
        return counts

    def flops_at(self, source: str) -> int:
        """Counts the FLOPs, as in `flops`, of the operations at one line of code, `file:line`."""
        flops = ((eqn, product_flops(eqn)) for _, eqn in equations(self.jaxpr))
        return sum(n for eqn, n in flops if n and source_of([eqn]) == source)


def program_of_model(model, loss_fn: Callable, batch, policy: Policy) -> Program:
    """Traces the step of `loss_fn(model, batch)` for a Flax NNX model, which is not modified.

    The model stays in its mode (training or evaluation). Its module paths are the named scopes of the program.
    Gradients are those of its `nnx.Param` variables.

    Raises:
      UsageError: the model is not an NNX module, or the loss is not a floating scalar.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(
            f"wanted a Flax NNX module, got {type(model).__name__}; for a function of parameters use the variant with "
            "_function in its name"
        )
    before = nnx.state(model, nnx.Param)
    model = nnx.clone(model)
    apply_policy(model, policy)
    name_scopes(model)  # after apply_policy, so that the module's scope contains the casts
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_of(params, rest, batch):
        return loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    return program_of(loss_of, params, {"state": rest, "batch": batch}, before=before, ruled=ruled_modules(model))


def program_of_function(loss_fn: Callable, params, batch, policy: Policy) -> Program:
    """Traces the step of `loss_fn(params, batch)`, a function of pytrees, under autocast.

    Gradients are those of the floating arrays in `params`.

    Raises:
      UsageError: the loss is not a floating scalar.
    """
    return program_of(autocast(loss_fn, policy), params, {"batch": batch})


def program_of(
    loss_of: Callable, params, others: Mapping[str, Any], *, before=None, ruled: Iterable[str] | None = None
) -> Program:
    """Traces the forward and backward pass of `loss_of(params, *others.values())`, which already contains the casts.

    Args:
      loss_of: a function of pytrees; returns a scalar, or a pair of the scalar and auxiliary values, which are dropped.
        Array leaves are traced.
      params: the pytree that the loss is differentiated with respect to.
      others: the other arguments by name, not differentiated.
      before: `params` before the policy cast them, for the reference; None for `params`.
      ruled: the module paths that a rule of the policy can apply to; None for every named scope.

    Raises:
      UsageError: the loss is not a floating scalar.
    """
    arrays, with_arrays = split_arrays((params, *others.values()))

    def step(*inputs):
        *values, scale = inputs
        params, *rest = with_arrays(values)
        leaves, with_leaves = split_arrays(params)  # an Equinox module has leaves that are not arrays

        def scaled(leaves):
            loss = _loss_in(loss_of(with_leaves(leaves), *rest))
            return loss.astype(widest(loss.dtype, FLOAT32)) * scale

        with loss_cotangent(scale):
            loss, gradients = jax.value_and_grad(scaled, allow_int=True)(leaves)
        return loss, [g for g in gradients if is_floating(g)]

    jaxpr = jax.make_jaxpr(step)(*arrays, jnp.float32(1))
    named_leaves = _named(params)
    names = [name for name, _ in named_leaves]
    owners = tuple(name.rpartition("/")[0] for name in names)
    originals = arrays[: len(named_leaves)] if before is None else split_arrays(before)[0]
    inputs = [original if array.dtype in NARROW else array for original, array in zip(originals, arrays, strict=False)]
    paths = dict.fromkeys(path for path, _ in equations(jaxpr))
    ruled = {without_class(path) for path in paths} if ruled is None else set(ruled)
    # A module that only contains other modules has no equation of its own, so its path is added here.
    around = dict.fromkeys(prefix for path in (*paths, *owners) for prefix in _prefixes(path))
    return Program(
        jaxpr=jaxpr,
        inputs=[brought_here(array) for array in (*inputs, *arrays[len(named_leaves) :])],
        gradients=tuple(name for name, leaf in named_leaves if is_floating(leaf)),
        owners=owners,
        names=(
            *(f"parameter {name}" for name in names),
            *("/".join(filter(None, (of, name))) for of, tree in others.items() for name, _ in _named(tree)),
        ),
        modules=tuple(path for path in around if path in ruled),
    )


def _loss_in(result) -> jax.Array:
    """Extracts the loss from the result of a loss function: a scalar, or the first of two values in a tuple.

    Raises:
      UsageError: the loss is not a floating scalar.
    """
    loss = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not (is_array(loss) or isinstance(loss, float)):
        raise UsageError(f"the loss must be a floating scalar, or a pair (loss, aux), got {type(result).__name__}")
    loss = jnp.asarray(loss)
    if loss.shape or not is_floating(loss):
        raise UsageError(f"the loss must be a floating scalar, got {loss.dtype.name}{list(loss.shape)}")
    return loss


def _prefixes(path: str) -> list[str]:
    """Lists a path and the paths that contain it, the shortest first: "a", "a/b", "a/b/c"."""
    parts = path.split("/")
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _named(tree) -> list[tuple[str, Any]]:
    """Lists the arrays of a pytree with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(_name(path), leaf) for path, leaf in leaves if is_array(leaf)]


def _name(path: tuple) -> str:
    """The path of a parameter, without `value`, the attribute in which NNX holds the array."""
    return path_name(path).removesuffix("/value")
