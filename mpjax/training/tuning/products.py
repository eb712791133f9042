"""Extracts the modules of a model that contain matrix products or convolutions, as programs to time."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models.scan import with_first_blocks
from mpjax.precision.calls import modules_of, wrap
from mpjax.precision.casting.values import is_array
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import FLOAT32, is_floating, widest
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy
from mpjax.precision.policy_report import PolicyReport
from mpjax.precision.rules import HEAD, NORM
from mpjax.training.setup import Task
from mpjax.training.state import take_apart


PRODUCTS = ("dot_general", "conv_general_dilated")


class ModuleProgram(NamedTuple):
    """The forward and backward pass of one module.

    Attributes:
      run: maps two lists of arrays, differentiated and not, to output and gradients; not compiled.
      inputs: shapes and dtypes of the two lists.
      text: the jaxpr as text; programs with the same text need to be timed only once.
    """

    run: Callable
    inputs: tuple[list, list]
    text: str


class Product(NamedTuple):
    """A module that contains matrix products or convolutions.

    Attributes:
      path: the path of the module.
      type: the name of its class.
      half: the program in half precision.
      full: the program in float32 with half-precision input and output, including the casts between them.
    """

    path: str
    type: str
    half: ModuleProgram
    full: ModuleProgram


def products_of(task: Task, policy: Policy, batch: Mapping[str, Any]) -> list[Product]:
    """Finds the outermost submodules that have products of their own and that no rule of the user decides.

    Args:
      task: the model and its loss.
      policy: the half-precision policy of the model.
      batch: the shapes of one device's micro-batch.
    """
    calls, owners = _calls(task, batch)
    modules = modules_of(with_first_blocks(task.abstract))
    products: list[Product] = []
    for path in sorted(owners & set(calls), key=lambda path: (path.count("/"), path)):
        if _is_open(path, task.precision) and not any(is_in(path, product.path) for product in products):
            half, full = (_program(modules[path], calls[path], policy, d) for d in (policy.compute_dtype, FLOAT32))
            products.append(Product(path, type(modules[path]).__name__, half, full))
    order = list(calls)  # in the order of the program
    return sorted(products, key=lambda product: order.index(product.path))


def is_in(path: str, module: str) -> bool:
    """True if `path` is the path of `module` or of a module inside it."""
    return f"{path}/".startswith(f"{module}/")


def _is_open(path: str, report: PolicyReport) -> bool:
    """True if no rule of the user decides the module or a module inside it."""
    return all(row.rule in ("policy", NORM, HEAD) for row in report if is_in(row.path, path))


@dataclasses.dataclass(frozen=True, eq=False)
class _Recording:
    """A wrapper that records the abstract arguments of a module's first call."""

    path: str
    calls: dict[str, tuple]
    depth: ClassVar[int] = -1

    def __call__(self, call, module, *args, **kwargs):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, (args, kwargs))
        self.calls.setdefault(self.path, shapes)
        return call(module, *args, **kwargs)


def _calls(task: Task, batch: Mapping[str, Any]) -> tuple[dict[str, tuple], set[str]]:
    """Traces the loss; returns the abstract arguments of each module's first call by path, and the owners of products.

    An owner is the path of the innermost module around a product.
    """
    calls: dict[str, tuple] = {}

    def loss(params, stats, key, batch):
        model = task.structure.assemble(params, stats, key)
        model.train()
        for path, module in modules_of(model).items():
            wrap(module, _Recording(path, calls))
        return task.objective.loss(model, batch, key)[0].value

    _, params, stats = take_apart(task.abstract)
    jaxpr = jax.make_jaxpr(loss)(params, stats, jax.random.key(0), batch)
    scopes = {scope for scope, eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS}
    paths = [path for path in modules_of(task.abstract) if path]
    owners = {max((path for path in paths if is_in(scope, path)), key=len, default="") for scope in scopes}
    return calls, owners - {""}


def _program(module: nnx.Module, call: tuple, policy: Policy, compute_dtype: np.dtype) -> ModuleProgram:
    """Builds a program of a module that computes in `compute_dtype`; input and output have the dtype of the policy.

    `call` holds the positional and the keyword arguments of the module, with shapes in place of arrays.
    """
    module = nnx.merge(*nnx.split(module))
    outside = policy.compute_dtype
    apply_policy(module, Policy(widest(policy.param_dtype, compute_dtype), compute_dtype, outside))
    module.train()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, treedef = jax.tree.flatten((params, rest, call), is_leaf=_is_abstract)
    leaves = [_as(leaf, outside) if i >= _count((params, rest)) else leaf for i, leaf in enumerate(leaves)]
    moved = [i for i, leaf in enumerate(leaves) if _is_abstract(leaf) and is_floating(leaf)]
    fixed = [i for i, leaf in enumerate(leaves) if _is_abstract(leaf) and not is_floating(leaf)]

    def run(by: list, others: list):
        def forward(by: list):
            filled = list(leaves)
            for i, array in zip((*moved, *fixed), (*by, *others), strict=True):
                filled[i] = array
            params, rest, (args, kwargs) = jax.tree.unflatten(treedef, filled)
            return nnx.merge(graph, params, rest)(*args, **kwargs)

        # The output is its own cotangent: it has the right shape and is not zero.
        output, pull = jax.vjp(forward, by)
        return output, pull(output)

    inputs = [leaves[i] for i in moved], [leaves[i] for i in fixed]
    text = re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(*inputs)))
    return ModuleProgram(run, inputs, text)


def _is_abstract(leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _count(tree) -> int:
    return len(jax.tree.leaves(tree, is_leaf=_is_abstract))


def _as(leaf, dtype: np.dtype):
    """Casts an abstract floating leaf; any other leaf is unchanged."""
    if not _is_abstract(leaf) or not is_floating(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def arrays_like(shapes: list, seed: int = 0) -> list[jax.Array]:
    """Creates arrays of these shapes, as inputs for a program.

    They are not zero, because some processors are faster on zeros.
    """

    def one(number: int, shape) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(key, shape.shape)
        if is_floating(shape):
            return (jax.random.normal(key, shape.shape) * np.float32(0.1)).astype(shape.dtype)
        return jnp.ones(shape.shape, shape.dtype)

    return [one(number, shape) for number, shape in enumerate(shapes)]
