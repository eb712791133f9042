"""Applies a policy to a Flax NNX module: sets the dtypes of every submodule, and reports them."""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.attention import attention_fn_for
from mpjax.precision.calls import has_call, modules_of, unwrap, wrap
from mpjax.precision.dtypes import FLOAT32, FLOAT64, HALF, is_floating, require_x64, widest
from mpjax.precision.float8.layers import (
    is_quantised,
    not_covered,
    nothing_quantised,
    reason_not_in_float8,
    set_products,
    stacked_not_covered,
)
from mpjax.precision.float8.recipes import Recipe
from mpjax.precision.heads import layer_tags, leave_in_float32
from mpjax.precision.layers import Casts, SumsInFloat32, adds_up, keep_carried
from mpjax.precision.module_tree import class_names, lineages_of, second_names, variables_by_module
from mpjax.precision.policy import Policy
from mpjax.precision.policy_report import PolicyReport, PolicyRow
from mpjax.precision.presets import get_policy
from mpjax.precision.rules import (
    DEFAULTS,
    HEAD,
    LINEAR,
    NORM,
    ROUTER,
    SMALL_PRODUCT,
    STATE_SPACE,
    TEMPERATURE,
    Rules,
    by_path,
    decide,
    is_default,
    is_norm,
    winner,
)


if TYPE_CHECKING:
    from flax import nnx


def apply_policy(model: "nnx.Module", policy: "str | Policy") -> PolicyReport:
    """Casts the parameters of `model` and sets the dtypes that its submodules compute in, in place.

    Casts parameters to `param_dtype`, and makes layers compute in `compute_dtype`. Normalisation layers take their
    input, statistics and parameters in float32 (or wider) and cast their output to `compute_dtype`. The model casts its
    output to `output_dtype`. The policy's rules override these defaults. A rule for a module that has no `dtype`
    attribute and no layers in it, such as a softmax of your own, casts the floating inputs of its calls, and casts
    outputs with the shape of an input back; a rule in half precision does so with a module without parameters only if
    it names this module, by `type:` or its last word. A later call of `apply_policy` replaces the policy.

    >>> import mpjax
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
    >>> print(mpjax.apply_policy(model, "mixed_float16"))
    path      type       param_dtype  compute_dtype  rule
    --------  ---------  -----------  -------------  ---------
    layers/0  Linear     float32      float16        policy
    layers/1  LayerNorm  float32      float32        type:norm

    Args:
      model: any NNX module, also an abstract one from `nnx.eval_shape`.
      policy: a `Policy`, or anything else that `get_policy` takes.

    Returns:
      A `PolicyReport`. It prints as a table and iterates over rows (`path`, `type`, `param_dtype`, `compute_dtype`,
      `rule`), one for each submodule that has parameters or a `dtype`, or whose calls a rule casts.

    Raises:
      UsageError: a rule matches no module, or only modules that earlier rules decide; a dtype is float64 without 64-bit
        JAX; `model` is not an NNX module; or no layer multiplies in float8 although the policy's products are in float8
        and only default rules exclude layers.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(f"apply_policy takes a Flax NNX module, got {type(model).__name__}")
    policy = get_policy(policy)
    require_x64(*policy.dtypes)

    modules = modules_of(model)
    rules = rules_for_modules(policy)
    tags = layer_tags(modules)
    decided = decide(rules, lineages_of(modules, tags), second_names(modules))

    variables = variables_by_module(model, modules)
    rows, notes = [], []
    for path, module in modules.items():
        rule = decided[path]
        notes += _not_understood(path, module)
        value = rules[rule] if rule else None
        ruled = False
        if rule and not is_default(rule) and not isinstance(value, Recipe) and _is_own_code(module):
            # Positions, say, are float32 for a reason, and a rule for all around them does not mean them.
            meant = policy.computes(value) not in HALF or _holds_floating(module) or _names(rule, path, module)
            ruled = meant and has_call(type(module))
            if not ruled and policy.computes(value) != policy.compute_dtype and _has_floating(variables[path]):
                notes.append(_not_computed(path, module, rule, policy.computes(value)))
        row = _apply(path, module, variables[path], policy, rule, value, ruled=ruled)
        output_dtype = _output_dtype(path, module, tags, policy, rule, value)
        leave_in_float32(module, in_float32=policy.computes(value) in HALF and _is_wide(output_dtype))
        recipe = policy.multiplies(value)
        if set_products(module, recipe):
            row = row._replace(compute_dtype=recipe.forward if recipe else None)
        elif reason := reason_not_in_float8(module, recipe or (policy.products if rule == SMALL_PRODUCT else None)):
            notes.append(f"{path or 'the model'} multiplies in {row.compute_dtype}, not in float8: {reason}")
        if row.param_dtype is not None or row.compute_dtype is not None:
            rows.append(row)
    _require_products(policy, any(map(is_quantised, modules.values())), decided, tags)
    if policy.recipes:
        notes += not_covered(rules, modules, tags)
        notes += stacked_not_covered(modules)
    return PolicyReport(rows, notes)


def ruled_modules(model: "nnx.Module") -> list[str]:
    """Lists the paths of the modules whose compute dtype a rule can set.

    Modules with their own `__call__` and no layers in them come first. Layers with a `dtype`, and norms, follow.
    """
    modules = modules_of(model)
    with_own_code = [path for path, module in modules.items() if has_call(type(module)) and _is_own_code(module)]
    return with_own_code + [path for path, module in modules.items() if _is_layer(module)]


def _is_own_code(module: "nnx.Module") -> bool:
    """True if neither a module nor a submodule has a `dtype` to set or is a norm: its own code alone computes."""
    from flax import nnx

    return not any(isinstance(node, nnx.Module) and _is_layer(node) for _, node in nnx.iter_graph(module))


def _is_layer(module) -> bool:
    return _has_dtype(module, "dtype") or is_norm(class_names(module))


def _holds_floating(module: "nnx.Module") -> bool:
    from flax import nnx

    return _has_floating(node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable))


def _names(pattern: str, path: str, module: "nnx.Module") -> bool:
    """True if a pattern names a module by its class or by the last word of its path, not a module around it."""
    if pattern.lower().startswith("type:"):
        return pattern.lower().removeprefix("type:") in (name.lower() for name in class_names(module))
    return pattern.rpartition("/")[2] == path.rpartition("/")[2]


def _not_computed(path: str, module, rule: str, dtype: np.dtype) -> str:
    return (
        f"rule '{rule}' does not change what {path or 'the model'} computes: {type(module).__name__} has no dtype and "
        f"no __call__; cast in the code that uses it, as in x.astype(jnp.{dtype})"
    )


def _has_floating(variables: Iterable) -> bool:
    return any(is_floating(variable.get_value()) for variable in variables)


def _output_dtype(path: str, module, tags: dict, policy: Policy, rule: str | None, value) -> np.dtype | None:
    """The dtype wanted of results that may be logits, which decides the dtype of their sums; None if none is set.

    It is the policy's `output_dtype` for the model itself, and for a head or an embedding that no rule of the user
    decides. Otherwise it is the `output_dtype` of the rule that decides, if its value is a policy.
    """
    from flax import nnx

    # An embedding may compute tied logits. A head that a preset keeps out of float8 still produces the output.
    at_the_end = isinstance(module, nnx.Embed) or HEAD.removeprefix("type:") in tags.get(path, ())
    if path == "" or (at_the_end and rule in (None, *DEFAULTS)):
        return policy.output_dtype
    return value.output_dtype if isinstance(value, Policy) else None


def _is_wide(dtype: np.dtype | None) -> bool:
    return dtype is not None and dtype not in HALF


def _require_products(policy: Policy, any_quantised: bool, decided: dict, tags: dict) -> None:
    """Raises UsageError if a policy wants float8 products, no layer has any, and no rule of the user is the cause.

    Args:
      policy: the policy.
      any_quantised: whether a layer multiplies in float8.
      decided: the pattern that decides each module, by path; None where no rule does.
      tags: the tags of layers, by path.
    """
    by_default = {decided[path] for path in tags if LINEAR in tags[path]} <= {None, *DEFAULTS}
    if policy.products is not None and by_default and not any_quantised:
        raise UsageError(nothing_quantised(policy.products, decided, tags))


def stored_dtypes(model: "nnx.Module", policy: "str | Policy") -> dict[str, np.dtype]:
    """Finds the dtype in which `apply_policy(model, policy)` would store each parameter and batch statistic, by path.

    Other variables are not in the result. The model stays unchanged, and nothing is allocated. Raises UsageError like
    `apply_policy`.
    """
    from flax import nnx

    graph, state = nnx.split(model)
    abstract = nnx.merge(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
    apply_policy(abstract, policy)
    kept = nnx.to_flat_state(nnx.state(abstract, (nnx.Param, nnx.BatchStat)))
    return {"/".join(map(str, path)): variable.get_value().dtype for path, variable in kept}


def rules_for_modules(policy: Policy) -> Rules:
    """Adds default rules after the policy's rules: for norms, routers, recurrences, temperatures, and the head.

    The head is the layer that produces the output. By default norms, routers of experts, recurrences (`StateSpace`) and
    temperatures of comparisons compute in float32 (or wider), and the head follows the policy without its rules. A
    default rule is left out if the policy has a rule with the same pattern. The rule for the head is added only if the
    policy computes in half precision and its outputs are wider.
    """
    wide = widest(policy.compute_dtype, FLOAT32)
    default: dict[str, Any] = dict.fromkeys((NORM, ROUTER, STATE_SPACE, TEMPERATURE), wide)
    if policy.compute_dtype in HALF and policy.output_dtype not in HALF:
        default[HEAD] = dataclasses.replace(policy, rules=())
    return Rules(
        {**policy.rules, **{pattern: value for pattern, value in default.items() if pattern not in policy.rules}}
    )


def storage_policy(policy: Policy) -> Policy:
    """Derives the policy that `apply_policy` sets on a model whose calls run under `autocast`.

    It stores parameters like `policy`, rules included. It computes in float32 (or wider) and without float8 everywhere,
    so that layers cast nothing down and `autocast` alone decides the compute dtypes.
    """
    compute = widest(policy.compute_dtype, FLOAT32)

    rules = {pattern: Policy(policy.stores(value), compute, compute) for pattern, value in policy.rules.items()}
    return dataclasses.replace(policy, compute_dtype=compute, rules=rules, products=None)


def scope_policy(model: "nnx.Module", policy: Policy) -> Policy:
    """Converts the `type:` patterns of a policy's rules to the module paths of a model, for `autocast` of that model.

    A model with routers has the default rule for them too, behind the policy's rules.

    Raises:
      UsageError: the policy's products are in float8, and the default rules keep all linear layers of the model, if it
        has any, out of float8.
    """
    modules = modules_of(model)
    tags = layer_tags(modules)
    lineages = lineages_of(modules, tags)
    decided = {lineage[-1][0]: winner(policy.rules, lineage) for lineage in lineages}
    # Layers from outside Flax may multiply by weights too; autocast finds their products.
    in_float8 = has_products_in_float8(model, policy) or not any(LINEAR in module_tags for module_tags in tags.values())
    _require_products(policy, in_float8, decided, tags)
    rules = policy.rules
    routers = {ROUTER.removeprefix("type:")} & {name for lineage in lineages for name in lineage[-1][1]}
    if routers and ROUTER not in rules:
        rules = Rules({**rules, ROUTER: widest(policy.compute_dtype, FLOAT32)})
    return dataclasses.replace(policy, rules=by_path(rules, lineages))


def has_products_in_float8(model: "nnx.Module", policy: Policy) -> bool:
    """True if at least one linear layer has a float8 recipe under the policy that its sides allow; changes nothing."""
    modules = modules_of(model)
    tags = layer_tags(modules)
    for lineage in lineages_of(modules, tags):
        path, types = lineage[-1]
        pattern = winner(policy.rules, lineage)
        recipe = policy.multiplies(policy.rules[pattern] if pattern else None)
        if LINEAR in types and recipe is not None and reason_not_in_float8(modules[path], recipe) is None:
            return True
    return False


def _apply(path: str, module, variables: list, policy: Policy, rule: str | None, value, *, ruled: bool) -> PolicyRow:
    """Sets the dtypes of one module's own variables and computation, in place; its submodules stay unchanged.

    Replaces the casts that an earlier policy put around the module's calls.

    Args:
      path: the path of the module.
      module: the module.
      variables: its own variables.
      policy: the policy of the model.
      rule: the pattern that decides the module; None if no rule does.
      value: the value of that rule: a dtype, a policy or a recipe; None without a rule.
      ruled: whether the rule casts the inputs of the module, because its code chooses no dtype.

    Returns:
      The module's row of the report.
    """
    if isinstance(value, Policy):
        param_dtype, compute_dtype, output_dtype = value.param_dtype, value.compute_dtype, value.output_dtype
    elif value is not None:
        param_dtype, compute_dtype = policy.stores(value), policy.computes(value)
        output_dtype = policy.compute_dtype if rule is not None and rule.lower() == NORM else None
    else:
        param_dtype, compute_dtype, output_dtype = policy.param_dtype, policy.compute_dtype, None
    if path == "":
        output_dtype = policy.output_dtype

    has_params = _cast_variables(variables, param_dtype)
    has_dtype = _has_dtype(module, "dtype")
    if has_dtype:
        module.dtype = compute_dtype
    if _has_dtype(module, "param_dtype"):
        module.param_dtype = param_dtype
    if hasattr(module, "attention_fn"):
        module.attention_fn = attention_fn_for(module.attention_fn, compute_dtype)
    norm = is_norm(class_names(module))
    inside = compute_dtype if norm or ruled else None
    if norm and output_dtype is None:
        output_dtype = compute_dtype
    outside = output_dtype if path == "" or has_dtype or inside is not None else None
    for kind in (Casts, SumsInFloat32):
        unwrap(module, kind)
    if inside is not None or outside is not None:
        wrap(module, Casts(inside, outside, restores=ruled and output_dtype is None))
    if compute_dtype in HALF and adds_up(module):
        wrap(module, SumsInFloat32())
    keep_carried(module, compute_dtype)
    return PolicyRow(
        path=path,
        type=type(module).__name__,
        param_dtype=param_dtype if has_params else None,
        compute_dtype=compute_dtype if has_dtype or inside is not None else None,
        rule=rule or "policy",
    )


def _cast_variables(variables: list, param_dtype: np.dtype) -> bool:
    """Casts floating parameters to `param_dtype`, and adapters and batch statistics to the wider of it and float32.

    A class of parameters with the attribute `in_float32` is of adapters (`mpjax.models.lora`).

    Returns:
      True if one of the variables is a floating parameter.
    """
    from flax import nnx

    has_params = False
    for variable in variables:
        if not is_floating(variable.get_value()):
            continue
        if isinstance(variable, nnx.Param):
            has_params = True
            least = FLOAT32 if getattr(type(variable), "in_float32", False) else param_dtype
            variable.set_value(_astype(variable.get_value(), widest(param_dtype, least)))
        elif isinstance(variable, nnx.BatchStat):
            variable.set_value(_astype(variable.get_value(), widest(param_dtype, FLOAT32)))
    return has_params


def _astype(value, dtype: np.dtype):
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=value.sharding)
    return value.astype(dtype)


def _has_dtype(module, name: str) -> bool:
    """True if the attribute `name` of a module can hold a dtype: it is a floating dtype of 16, 32 or 64 bits, or None.

    False if there is no such attribute, or if it is a property or a method.
    """
    if not _is_stored(module, name):
        return False
    value = getattr(module, name)
    if not isinstance(value, str | type | np.dtype):
        return value is None
    try:
        return np.dtype(value) in (*HALF, FLOAT32, FLOAT64)
    except TypeError:
        return False


def _not_understood(path: str, module) -> Iterator[str]:
    for name in ("dtype", "param_dtype"):
        if _is_stored(module, name) and not _has_dtype(module, name):
            where = f"{path}.{name}" if path else name
            yield f"{where} is {getattr(module, name)!r}, which is not a floating dtype to compute in: left as it is"


def _is_stored(module, name: str) -> bool:
    """True if the attribute `name` is a plain value on the module or its class, and no property or method."""
    if name in vars(module):
        return True
    return hasattr(module, name) and not hasattr(inspect.getattr_static(module, name), "__get__")
