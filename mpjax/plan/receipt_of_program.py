"""Reads the receipt of a compiled program: the dtypes that it runs in, against the dtypes asked for."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from mpjax.plan.asked import AskedProgram, asked_of
from mpjax.plan.dtype_order import NARROWER, compared, together
from mpjax.plan.hlo import parse
from mpjax.plan.kernels import update_bytes
from mpjax.plan.pairing import paired
from mpjax.plan.product_verdicts import paths_of, rows_of_products, rows_of_recipe
from mpjax.plan.receipt_report import Receipt
from mpjax.plan.runs import Target, loops_of, runs_of
from mpjax.plan.sums_and_updates import sums_of, updates_of
from mpjax.plan.verdicts import rows_of_accumulations, rows_of_casts, rows_of_sums, rows_of_updates
from mpjax.precision.casting.walk import equations
from mpjax.precision.dtypes import HALF, is_floating, path_name, widest
from mpjax.precision.float8.history import is_history
from mpjax.precision.policy import Policy
from mpjax.precision.product_dtypes import asked_dtypes


_DERIVATIVE = "jvp("
"""Part of the names of all operations of a differentiated function."""

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that a program returns.

    Attributes:
      output: the number of its output.
      asked: the narrowest dtype allowed for its update.
      dims: its dimensions.
      stored: the dtype that it is stored in.
      returned: the dtype that it is returned in.
    """

    output: int
    asked: str
    dims: tuple[int, ...]
    stored: str
    returned: str


def receipt_of(
    executable: Any,
    jaxpr: Any,
    target: Target,
    policy: Policy | None,
    *,
    text: str = "",
    modules: Mapping[Any, Any] = MappingProxyType({}),
    params: int = 0,
    updates: str = "",
) -> Receipt:
    """Reads the receipt of a compiled program.

    Args:
      executable: the `jax.stages.Compiled`.
      jaxpr: the traced program; None if unknown.
      target: the device that the program was compiled for.
      policy: the policy; None to compare with the traced program alone.
      text: the text of the program, if it is already known.
      modules: NNX modules whose classes the policy's rules may name, by any key.
      params: the index among the arguments of the parameters, or of a training state that has `params`.
      updates: the narrowest dtype allowed for updates of parameters: float32 with master weights.

    Raises:
      UsageError: a rule of the policy decides nothing.
    """
    text = text or executable.as_text()
    program, divided = parse(text), _PARTITIONS.search(text[: text.find("\n")])
    asked = None if jaxpr is None else asked_of(jaxpr)
    pairs = paired(
        asked.products if asked else (),
        runs_of(program, target),
        lambda: loops_of(program),
        partitions=int(divided[1]) if divided else 1,
    )
    arguments, wanted = executable.args_info[0], asked_dtypes(policy, modules)
    wanted.require_rules(None if jaxpr is None else {scope for scope, _ in equations(jaxpr)})
    least = updates or (str(policy.param_dtype) if policy else "")
    # An array that is both argument and result need not be a parameter, unless something is differentiated.
    differentiated = _DERIVATIVE in text if asked is None else any(each.differentiated for each in asked.products)
    parameters, updated = {}, {}
    if params < len(arguments):
        narrower = asked is not None and differentiated
        parameters = parameters_of(arguments[params], executable.out_info, least, narrower=narrower)
        updated = _updated(parameters, asked, differentiated=differentiated)
    dtypes = updates_of(program, [each.output for each in updated.values()])
    state = {number for given in arguments for _, number in _returned(given, executable.out_info).values()}
    recipe = None if policy is None else wanted.awaited(paths_of(pairs))
    traced, rounds = asked is not None, {str(dtype) for dtype in wanted.dtypes}
    products = rows_of_products(pairs, wanted, target, traced=traced, rounds=rounds)
    rows = [
        *products,
        *rows_of_recipe(recipe, products, target, traced=traced),
        *rows_of_sums(
            asked.sums if asked else (),
            sums_of(program),
            least=str(policy.reduce_dtype) if policy else None,
            parameters=[each.dims for each in parameters.values()],
        ),
        *(rows_of_accumulations(program) if policy is not None and policy.reduce_dtype not in HALF else ()),
        *rows_of_casts(asked.sums if asked else (), asked.cast if asked else (), rounds),
        *rows_of_updates(
            {path: (updated[path].asked, run) for path, run in zip(updated, dtypes, strict=True)},
            _rounded(updated, asked),
        ),
    ]
    notes = []
    if asked and differentiated and not any(dtypes) and not any(asked.gradients):
        known = f"argument {params} has no array that comes" if not modules else "no array of a model comes"
        notes.append(f"no update was looked at: {known} back changed{_changed(params, arguments, executable, asked)}")
    return Receipt(
        target.name,
        None if policy is None else str(policy),
        tuple(rows),
        update_bytes(program, sorted(state)) if any(dtypes) else 0,
        tuple(notes),
    )


def _updated(
    parameters: Mapping[str, Parameter], asked: AskedProgram | None, *, differentiated: bool
) -> dict[str, Parameter]:
    """The parameters that are returned, except those whose output is a gradient."""
    return {
        path: each
        for path, each in parameters.items()
        if not ((asked and asked.gradients[each.output]) or (not path and not differentiated))
    }


def _rounded(updated: Mapping[str, Parameter], asked: AskedProgram | None) -> dict[str, str]:
    """The dtypes that a traced program rounds new parameters to, where these are narrower than the stored dtypes."""
    if asked is None:
        return {}
    rounded = {path: together([asked.rounded[each.output], each.returned]) for path, each in updated.items()}
    return {path: dtype for path, dtype in rounded.items() if compared([updated[path].stored], [dtype]) == NARROWER}


def _changed(params: int, arguments: Any, executable: Any, asked: AskedProgram) -> str:
    """Names another argument that is returned as updated parameters are; empty if there is none."""
    for number, given in enumerate(arguments):
        found = parameters_of(given, executable.out_info)
        if number != params and _updated(found, asked, differentiated=True):
            return f"; argument {number} comes back: write params={number} if it has the parameters"
    return ""


def target_of(executable: Any) -> Target:
    """The device that a `jax.stages.Compiled` is for."""
    shardings = jax.tree.leaves((executable.output_shardings, executable.input_shardings))
    device = next(iter(shardings[0].device_set)) if shardings else jax.devices()[0]
    if device.platform == "cpu":
        return Target("this CPU", "cpu")
    try:
        rounds = device.platform == "gpu" and float(device.compute_capability) >= 8.0
    except (AttributeError, ValueError):  # on AMD, the capability is a name, "gfx942"
        rounds = False
    return Target(str(device.device_kind), str(device.platform), rounds)


def parameters_of(given: Any, result: Any, least: str = "", *, narrower: bool = False) -> dict[str, Parameter]:
    """The parameters that a function takes and returns, by path.

    Args:
      given: the argument with the parameters, or a training state that has `params`; arrays may be abstract.
      result: all results, in the program's order.
      least: the dtype that updates are to be computed in, for parameters of a narrower dtype.
      narrower: whether parameters with a path may be returned in fewer bits than they are given in.
    """
    found = _returned(given, result, narrower=narrower)
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(result)]
    if any(path.startswith("params/") for path in _names(given)):
        found = {path: each for path, each in found.items() if path.startswith("params/")}
    return {
        path.removeprefix("params/"): Parameter(
            number,
            str(widest(leaf.dtype, least) if least else leaf.dtype),
            tuple(leaf.shape),
            str(leaf.dtype),
            str(dtypes[number]),
        )
        for path, (leaf, number) in found.items()
        if not is_history(path)
    }


def _names(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _returned(given: Any, result: Any, *, narrower: bool = False) -> dict[str, tuple[Any, int]]:
    """The floating arrays of an argument that are returned in their shape and dtype, with the number of the output.

    With `narrower`, the returned dtype of arrays with a path may have fewer bits. An output has the path of the
    argument, or that path behind the number of the result.
    """
    outputs = list(_names(result).items())
    numbers = {path.partition("/")[2]: number for number, (path, _) in reversed(list(enumerate(outputs)))}
    numbers |= {path: number for number, (path, _) in enumerate(outputs)}
    found = {}
    for path, leaf in _names(given).items():
        number = numbers.get(path)
        if number is not None and is_floating(leaf):
            out = outputs[number][1]
            fewer = narrower and path and is_floating(out) and _has_fewer(out, leaf)
            if out.shape == leaf.shape and (out.dtype == leaf.dtype or fewer):
                found[path] = leaf, number
    return found


def _has_fewer(out: Any, leaf: Any) -> bool:
    return compared([str(leaf.dtype)], [str(out.dtype)]) == NARROWER
