"""Policies: the dtypes of parameters, computation and outputs, and their text form."""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from mpjax import notebook
from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, FLOAT32, as_dtype, widest
from mpjax.precision.float8.recipes import Recipe, as_recipe, find_recipe
from mpjax.precision.rules import Rules


T = TypeVar("T")

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
    **dict.fromkeys(("r", "reduce"), "reduce_dtype"),
    "products": "products",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes for parameters, computation, outputs and cross-device sums, with exceptions by module.

    Every dtype argument takes a name or a dtype. `get_policy(str(policy))` is an equal policy.

    >>> import mpjax
    >>> str(mpjax.Policy("float32", "bfloat16", rules={"head": "float32"}))
    'params=float32,compute=bfloat16,output=bfloat16;head=float32'

    Args:
      param_dtype: the dtype of the stored parameters; float32 by default.
      compute_dtype: the dtype of convolutions and matrix products; by default `param_dtype`.
      output_dtype: the dtype of the model's outputs (logits); by default `compute_dtype`.
      reduce_dtype: the dtype in which gradients are summed across devices; by default `param_dtype`, at least float32.
      rules: an ordered mapping from module pattern (see `Rules`) to a dtype, a policy or a recipe. A dtype sets the
        compute dtype of the matched modules, and stores their parameters in it or wider. A policy sets their parameter,
        compute and output dtypes. A recipe makes the matched linear layers multiply in float8 with it.
      products: the recipe for the float8 products of linear layers, or its name ("float8", "float8_rowwise", "mxfp8");
        None for products in `compute_dtype`.

    Raises:
      UsageError: a dtype or a recipe is unknown, a pattern is invalid, a rule's policy has rules itself, or products
        are in float8 and `compute_dtype` is not bfloat16 or float32.
    """

    param_dtype: Any = FLOAT32
    compute_dtype: Any = None
    output_dtype: Any = None
    reduce_dtype: Any = None
    rules: Any = ()
    products: Any = None

    def __post_init__(self):
        def settle(field: str, default: DTypeLike) -> np.dtype:
            value = getattr(self, field)
            dtype = as_dtype(default if value is None else value)
            object.__setattr__(self, field, dtype)
            return dtype

        param = settle("param_dtype", FLOAT32)
        compute = settle("compute_dtype", param)
        settle("output_dtype", compute)
        settle("reduce_dtype", widest(param, FLOAT32))
        rules = Rules(self.rules)
        object.__setattr__(self, "rules", Rules([(pattern, _rule_value(value)) for pattern, value in rules.items()]))
        object.__setattr__(self, "products", None if self.products is None else as_recipe(self.products))
        recipes = [self.products, *(value for value in self.rules.values() if isinstance(value, Recipe))]
        if any(recipes) and compute not in (BFLOAT16, FLOAT32):
            # An unscaled product reaches 448 * 448 * K, which float16 does not hold.
            raise UsageError(f"products in float8 need compute=bfloat16 or float32, got compute={compute}")

    def computes(self, value: "np.dtype | Policy | Recipe | None") -> np.dtype:
        """The compute dtype of modules that a rule with this value decides; None means no rule."""
        if isinstance(value, Policy):
            return value.compute_dtype
        return self.compute_dtype if value is None or isinstance(value, Recipe) else value

    def stores(self, value: "np.dtype | Policy | Recipe | None") -> np.dtype:
        """The dtype of stored parameters of modules that a rule with this value decides; None means no rule."""
        if isinstance(value, Policy):
            return value.param_dtype
        return widest(self.param_dtype, value) if isinstance(value, np.dtype) else self.param_dtype

    def multiplies(self, value: "np.dtype | Policy | Recipe | None") -> Recipe | None:
        """The recipe of linear layers that a rule with this value decides; None for products in the compute dtype."""
        if isinstance(value, Policy) or value is None:
            return (value or self).products
        return value if isinstance(value, Recipe) else None

    @property
    def recipes(self) -> frozenset[Recipe]:
        """The recipes of the policy and its rules."""
        return frozenset(filter(None, (self.products, *map(self.multiplies, self.rules.values()))))

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        """The dtypes of the policy and its rules, without those of sums over devices and of recipes."""
        policies = [value for value in (self, *self.rules.values()) if isinstance(value, Policy)]
        named = {value for value in self.rules.values() if isinstance(value, np.dtype)}
        return frozenset(named.union(*((each.param_dtype, each.compute_dtype, each.output_dtype) for each in policies)))

    @property
    def jmp(self) -> jmp.Policy:
        """The equivalent `jmp.Policy`, which has no `reduce_dtype`, rules or recipes."""
        fields = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return jmp.Policy(*(getattr(jnp, dtype.name) for dtype in fields))

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `param_dtype`; integers, keys and other leaves stay unchanged."""
        return self.jmp.cast_to_param(tree)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `compute_dtype`; integers, keys and other leaves stay unchanged."""
        return self.jmp.cast_to_compute(tree)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `output_dtype`; integers, keys and other leaves stay unchanged."""
        return self.jmp.cast_to_output(tree)

    def __str__(self) -> str:
        sections = [f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"]
        if self.reduce_dtype != widest(self.param_dtype, FLOAT32):
            sections[0] += f",reduce={self.reduce_dtype}"
        if self.products is not None:
            sections[0] += f",products={self.products}"
        sections += [f"{pattern}={value}" for pattern, value in self.rules.items()]
        return ";".join(sections)

    def _repr_html_(self) -> str:
        fields = ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")
        fields += ("products",) if self.products is not None else ()
        rows = [(field, str(getattr(self, field))) for field in fields]
        rules = [(pattern, str(value)) for pattern, value in self.rules.items()]
        return notebook.block(
            notebook.heading("Policy"),
            notebook.table(("field", "dtype"), rows),
            notebook.table(("rule: the first that matches decides", "dtype"), rules) if rules else "",
            notebook.verbatim(str(self)),
        )


def _rule_value(value) -> np.dtype | Policy | Recipe:
    """Converts a rule's value to a dtype, a policy or a recipe; `"float32"`, also the name of a preset, is a dtype."""
    if (recipe := find_recipe(value)) is not None:
        return recipe
    if isinstance(value, jmp.Policy):
        value = from_jmp(value)
    elif isinstance(value, str) and "=" in value:
        value = parse_policy(value)
    if not isinstance(value, Policy):
        return as_dtype(value)
    if value.rules:
        raise UsageError(f"a rule's policy cannot have rules of its own: {value}")
    return value


def from_jmp(policy: jmp.Policy) -> Policy:
    """Converts a `jmp.Policy`; other fields have their defaults."""
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def parse_policy(text: str) -> Policy:
    """Parses `"params=float32,compute=float16,output=float32;stem/*=float32"`: jmp's grammar plus more.

    As in jmp, keys may be short (`p`, `c`, `o`). Further keys are reduce (`r`) and products. By default params is
    float32, compute equals params and output equals compute. A rule, `pattern=dtype` or `pattern=policy`, follows each
    `;`.

    Raises:
      UsageError: a key, dtype or recipe is unknown, a key is given twice, a part has no value, or a rule no `=`.
    """
    head, *tail = split_rules(text)
    return dataclasses.replace(_parse_dtypes(head), rules=parse_rules(tail))


def split_rules(text: str) -> list[str]:
    """Splits a text at its semicolons and drops empty parts; returns `[""]` if all are empty."""
    return [part.strip() for part in text.split(";") if part.strip()] or [""]


def parse_rules(parts: list[str]) -> Rules:
    """Parses rules such as `["stem/*=float32", …]` to texts by pattern; without a `=`, raises UsageError."""
    pairs = []
    for rule in parts:
        pattern, equals, value = rule.partition("=")
        if not equals:
            raise UsageError(f"bad rule '{rule}': wanted pattern=dtype, as in 'stem/*=float32'")
        pairs.append((pattern.strip(), value.strip()))
    return Rules(pairs)


def _parse_dtypes(text: str) -> Policy:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        field = _KEYS.get(key.strip().lower())
        if field is None or not equals or not value.strip():
            raise UsageError(
                f"bad part '{part.strip()}' in policy '{text}': wanted params=, compute=, output= or reduce= and a "
                "dtype, as in 'params=float32,compute=float16,output=float32', or products= and a recipe"
            )
        if field in fields:
            raise UsageError(f"contradictory policy '{text}': {field} is given twice; keep one")
        fields[field] = as_recipe(value) if field == "products" else as_dtype(value)
    return Policy(**fields)
