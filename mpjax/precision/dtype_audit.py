"""Audits the dtype of every operation and every leaf of a function, by module path, from one trace."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpjax.errors import UsageError
from mpjax.precision.casting.flops import stands_in
from mpjax.precision.casting.jaxprs import is_transposed, opened, scope_of
from mpjax.precision.casting.model_arguments import ModelArguments, take_models_apart
from mpjax.precision.casting.one_equation import SourceLine, first_outside, source_lines, source_of
from mpjax.precision.casting.operations import OPERATIONS, Operations
from mpjax.precision.casting.primitives import DERIVED
from mpjax.precision.casting.values import has_jax_dtype
from mpjax.precision.casting.walk import bodies, called, equations, holds_bodies
from mpjax.precision.dtype_audit_report import Audit, Leaf, Operation, Upcast, WeakType
from mpjax.precision.dtypes import HALF, is_floating, path_name, widest
from mpjax.precision.float8.recipes import E4M3, E5M2, E8M0
from mpjax.precision.modules import stored_dtypes
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy
from mpjax.precision.product_dtypes import AskedDtypes, PolicyForModules
from mpjax.precision.rules import scope_lineage, winner


def audit(
    fn: Callable,
    *args,
    policy: "str | Policy | None" = None,
    params: int | None = 0,
    operations: Operations = OPERATIONS,
) -> Audit:
    """Traces `fn(*args)` once and reports the dtype of every floating operation and leaf. Nothing is computed.

    >>> import jax, jax.numpy as jnp, mpjax
    >>> report = mpjax.audit(lambda x: x * jnp.arange(2.0), jax.ShapeDtypeStruct((2,), jnp.float16))
    >>> [(upcast.operation, str(upcast.to_dtype)) for upcast in report.upcasts]
    [('mul', 'float32')]

    Args:
      fn: a function of pytrees, or a Flax NNX module, which is called in its current mode (training or evaluation).
      *args: the arguments of `fn`. Arrays may be abstract (`jax.ShapeDtypeStruct`); NNX modules may be among them.
      policy: the expected policy of products and stored leaves: a `Policy`, or anything that `get_policy` takes. The
        expected dtypes of NNX parameters are the dtypes that `apply_policy` would set. None expects no dtypes.
      params: if no NNX module is given, the index in `args` of the parameters, whose dtypes the policy decides; None if
        there are none.
      operations: the lists of operations, which decide the kind of each operation.

    Returns:
      An `Audit`. It prints as a table; `assert_clean()` is for tests, `to_json()` for machines. Module paths are named
      scopes. The audit opens the scopes of NNX modules; Flax linen, Haiku and Equinox open their own.

    Raises:
      UsageError: a rule of the policy matches no module of an NNX model, or `fn` cannot be called.
    """
    if not callable(fn):
        raise UsageError(f"audit takes a function or a Flax NNX module, got {type(fn).__name__}")
    models = take_models_apart({"": fn, "args": args})
    inputs, with_inputs = inputs_of(models)

    def of_inputs(*inputs):
        called, _ = models.join(with_inputs(inputs))
        return called[""](*called["args"])

    jaxpr, result = jax.make_jaxpr(of_inputs, return_shape=True)(*inputs.values())
    expected = None if policy is None else get_policy(policy)
    rows = _operations(jaxpr, operations)
    leaves = _leaves(inputs, {} if expected is None else _stored(inputs, models, expected, params))
    product_dtypes = PolicyForModules(expected, models.modules)
    return Audit(
        policy=None if expected is None else str(expected),
        operations=rows,
        leaves=leaves,
        upcasts=tuple(_upcasts(jaxpr, operations, product_dtypes)),
        products=tuple(_disobeying(rows, product_dtypes)),
        disobeying=tuple(leaf for leaf in leaves if leaf.wanted not in (None, leaf.dtype)),
        weak_types=tuple(_weak_types(inputs, result)),
        narrow=tuple(row for row in rows if row.kind == "full" and row.dtype in HALF),
    )


def inputs_of(models: ModelArguments) -> tuple[dict[str, Any], Callable]:
    """Collects the traced inputs (arrays, abstract arrays, numbers but no bools) of a call by path.

    Other leaves, such as flags and strings, are no inputs. Also returns a function that takes one value for each input,
    in the order of the dict, and builds a copy of `models.tree` with these values in their places.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(models.tree)
    places = tuple(models.originals)
    traced = {_input_name(path, places): i for i, (path, leaf) in enumerate(leaves) if _is_traced(leaf)}

    def with_inputs(inputs):
        filled = [leaf for _, leaf in leaves]
        for i, value in zip(traced.values(), inputs, strict=True):
            filled[i] = value
        return jax.tree.unflatten(treedef, filled)

    return {name: leaves[i][1] for name, i in traced.items()}, with_inputs


def _input_name(path: tuple, places: tuple) -> str:
    """Names an input by path: `blocks/0/conv1/kernel` if the model is the function, `args/1/image` in an argument."""
    half, *inner = path
    if half.idx == 0:  # the state of the models, where most arrays are the `value` of a variable
        number, *names = inner
        inner = [*places[number.key], *names[: -1 if isinstance(names[-1], jax.tree_util.GetAttrKey) else None]]
    return path_name(tuple(inner)).removeprefix("/")


def _is_traced(leaf) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return has_jax_dtype(leaf)
    if isinstance(leaf, bool):
        return False  # a flag such as `train=True`, which the function reads at trace time
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | int | float | complex)


def _operations(jaxpr, operations: Operations) -> tuple[Operation, ...]:
    counts: collections.Counter = collections.Counter()
    for body in bodies(jaxpr):
        for eqn in () if stands_in(body) else body.eqns:
            if not holds_bodies(eqn) and (dtype := _dtype(eqn)):
                counts[scope_of(eqn, body.scope), _primitive(eqn), dtype] += 1
    kinds = {_CAST: "cast", _BLOCK_PRODUCT: "low"}
    return tuple(
        Operation(path, name, kinds.get(name) or operations.rule(name), dtype, count)
        for (path, name, dtype), count in counts.items()
    )


def _primitive(eqn) -> str:
    """The name of an equation's primitive; for a custom `vmap` rule around a product in blocks, the product's name."""
    inside = equations(eqn.params["call"]) if eqn.primitive.name == "custom_vmap_call" else ()
    return _BLOCK_PRODUCT if any(held.primitive.name == _BLOCK_PRODUCT for _, held in inside) else eqn.primitive.name


def _dtype(eqn) -> np.dtype | None:
    """The dtype that an equation computes in: the widest of its floating inputs, or else of its floating outputs.

    For a cast, it is the new dtype. A float8 product of e4m3 and e5m2, the dtype of an incoming gradient, counts as
    e5m2. The scales of blocks (e8m0) do not count. It is None without floating inputs and outputs.
    """
    if eqn.primitive.name == _CAST:
        return np.dtype(eqn.params["new_dtype"]) if is_floating(eqn.outvars[0].aval) else None
    for atoms in (eqn.invars, eqn.outvars):
        if floating := {atom.aval.dtype for atom in atoms if is_floating(atom.aval)} - {E8M0}:
            return E5M2 if floating == {E4M3, E5M2} else widest(*floating)
    return None


def _leaves(inputs: dict[str, Any], stored: dict[str, np.dtype]) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(name, np.dtype(value.dtype), stored.get(name)) for name, value in inputs.items() if is_floating(value)
    )


def _stored(inputs: dict[str, Any], models: ModelArguments, policy: Policy, params: int | None) -> dict[str, np.dtype]:
    """Finds the dtype in which the policy stores each parameter and statistic, by the path of the input.

    With NNX modules, it is the dtype that `apply_policy` would store. Without, it is decided by the rules for the path
    inside the argument `params`.
    """
    if modules := models.modules:
        return {name: dtype for at, module in modules.items() for name, dtype in _stored_by(policy, at, module).items()}

    def wanted(path: str) -> np.dtype:
        pattern = winner(policy.rules, scope_lineage(path.rpartition("/")[0]))
        if pattern is None:
            return policy.param_dtype
        return policy.stores(policy.rules[pattern])

    prefix = f"args/{params}"
    return {name: wanted(name.removeprefix(f"{prefix}/")) for name in inputs if f"{name}/".startswith(f"{prefix}/")}


def _stored_by(policy: Policy, at: tuple, module) -> dict[str, np.dtype]:
    """Finds the dtypes in which `apply_policy` stores a module's parameters and batch statistics, by path.

    The paths begin with that of the module, the key path `at`.
    """
    return {f"{path_name(at)}/{name}".removeprefix("/"): dtype for name, dtype in stored_dtypes(module, policy).items()}


def _disobeying(rows: tuple[Operation, ...], wanted: Callable[[str], AskedDtypes | None]) -> Iterator[Operation]:
    for row in rows:
        requested = wanted(row.path) if row.kind == "low" else None
        if requested is not None and row.dtype not in requested.accepted:
            yield row


def _upcasts(jaxpr, operations: Operations, wanted: Callable[[str], AskedDtypes | None]) -> Iterator[Upcast]:
    for body in bodies(jaxpr):
        if any(is_transposed(caller) or _is_nowhere(caller) for caller in body.callers):
            continue
        casts = {eqn.outvars[0]: eqn for eqn in body.eqns if _is_silent_upcast(eqn)}
        for eqn in body.eqns:
            path, dtype = scope_of(eqn, body.scope), _dtype(eqn)
            requested = wanted(path)
            if dtype is None or (requested is not None and dtype == requested.compute):
                continue
            for value, where in _widened(eqn, casts, operations.rule(eqn.primitive.name) == "low"):
                source = source_of((where, *body.callers))
                yield Upcast(path, _name(eqn), np.dtype(value.dtype), dtype, value.shape, source)


def _is_nowhere(caller) -> bool:
    """True if all source lines of a call are in JAX's own files, as for derivative rules under `jax.checkpoint`.

    The user's line is lost then. All operations inside appear to be JAX's own, so that explicit and silent casts look
    the same.
    """
    lines = source_lines(caller)
    return bool(lines) and first_outside(lines, ("/jax/",)) == len(lines)


def _widened(eqn, casts: dict, is_product: bool) -> Iterator[tuple[Any, Any]]:
    """Yields the half-precision operands of `eqn` that were widened to match a wider operand.

    Each is a pair: the operand's abstract value before the cast, and the equation that widened it, a cast or `eqn`.

    Args:
      eqn: the equation.
      casts: the silent upcasts of the body, by the variable of their result; yielded casts are removed.
      is_product: whether the equation is on the low list, so that it can widen operands by itself.
    """
    floating = [atom for atom in _read_by(eqn) if is_floating(atom.aval)]
    cast = [atom for atom in floating if not isinstance(atom, core.Literal) and atom in casts]
    if len(cast) < len(floating):  # otherwise there is no wider operand, as in a sum that accumulates in float32
        for var in dict.fromkeys(cast):
            where = casts.pop(var)
            yield where.invars[0].aval, where
    if is_product and not is_transposed(eqn):  # a product can widen its operands itself, without a cast
        yield from ((atom.aval, eqn) for atom in floating if atom.aval.dtype in HALF and atom.aval.dtype != _dtype(eqn))


def _read_by(eqn) -> list[Any]:
    """Lists the operands that an equation computes with.

    For a function with a derivative rule, these are the operands that its body reads; others only get a gradient.
    """
    if eqn.primitive.name not in DERIVED:
        return list(eqn.invars)
    body, _ = opened(called(eqn))
    used = {atom for inner in body.eqns for atom in inner.invars if not isinstance(atom, core.Literal)}
    used |= {atom for atom in body.outvars if not isinstance(atom, core.Literal)}
    return [atom for atom, var in zip(eqn.invars, body.invars, strict=True) if var in used]


def _name(eqn) -> str:
    return eqn.params["name"].strip("_") if holds_bodies(eqn) and "name" in eqn.params else eqn.primitive.name


_CAST = "convert_element_type"
_BLOCK_PRODUCT = "scaled_matmul_wrapper"
"""The primitive of `jax.nn.scaled_matmul`. It is on no list, so autocast leaves its operands alone."""

_CASTS = frozenset({"astype", "array", "asarray", "convert_element_type"})
_AUTOCAST = "/mpjax/precision/casting/transform.py"


def _is_silent_upcast(eqn) -> bool:
    """True for a cast of a half-precision value to a wider dtype that the program does not ask for.

    Dtype promotion by JAX or by a Flax layer makes such casts. False for `astype` and the like in the program, for the
    casts of autocast, in files of norms, which widen their input on purpose, and in backward passes, whose casts follow
    from the forward pass.
    """
    if eqn.primitive.name != _CAST or is_transposed(eqn):
        return False
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if before not in HALF or widest(before, after) != after or after in HALF:
        return False
    lines = source_lines(eqn)
    if any(line.file.endswith(_AUTOCAST) for line in lines):
        return False  # autocast traces at the caller's dtypes; its lists decide which values are widened
    inside = [line.function for line in lines[: first_outside(lines, ("/jax/",))]]
    caller = lines[len(inside)] if len(inside) < len(lines) else SourceLine("", 0, "")
    if any(line.function == "promote_dtype" for line in lines):  # Flax layers promote input and parameters
        return True
    return not _CASTS.intersection(inside) and "norm" not in caller.file.rpartition("/")[2]


def _weak_types(inputs: dict[str, Any], result) -> Iterator[WeakType]:
    for name, value in inputs.items():
        if isinstance(value, int | float | complex) or getattr(value, "weak_type", False):
            yield WeakType(name, "argument", jnp.result_type(value))
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if getattr(leaf, "weak_type", False):
            yield WeakType(path_name(path), "result", leaf.dtype)
