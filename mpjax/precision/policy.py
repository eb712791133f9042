"""Policies: the dtypes of parameters, computation, outputs and gradient sums, and how a text spells them."""

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
        def set_dtype(field: str, default: DTypeLike) -> np.dtype:
            value = getattr(self, field)
            dtype = as_dtype(default if value is None else value)
            object.__setattr__(self, field, dtype)
            return dtype

        param = set_dtype("param_dtype", FLOAT32)
        compute = set_dtype("compute_dtype", param)
        set_dtype("output_dtype", compute)
        set_dtype("reduce_dtype", widest(param, FLOAT32))
        rules = Rules(self.rules)
        object.__setattr__(self, "rules", Rules([(pattern, _rule_value(value)) for pattern, value in rules.items()]))
        object.__setattr__(self, "products", None if self.products is None else as_recipe(self.products))
        recipes = [self.products, *(value for value in self.rules.values() if isinstance(value, Recipe))]
        if any(recipes) and compute not in (BFLOAT16, FLOAT32):
            # An unscaled product reaches 448 * 448 * K, which float16 does not hold.
            raise UsageError(f"products in float8 need compute=bfloat16 or float32, got compute={compute}")

    def computes(self, value: "np.dtype | Policy | Recipe | None") -> np.dtype:
        """Finds the compute dtype of a module from the value of the rule that decides it; None if no rule does.

        A dtype is the compute dtype itself; a policy has its own. Without a rule, and for a recipe, it is this policy's
        `compute_dtype`.
        """
        if isinstance(value, Policy):
            return value.compute_dtype
        return self.compute_dtype if value is None or isinstance(value, Recipe) else value

    def stores(self, value: "np.dtype | Policy | Recipe | None") -> np.dtype:
        """Finds the dtype of a module's stored parameters from the value of the rule that decides it; None: no rule.

        A policy has its own `param_dtype`. For a dtype, it is the wider of that dtype and this policy's `param_dtype`.
        Without a rule, and for a recipe, it is this policy's `param_dtype`.
        """
        if isinstance(value, Policy):
            return value.param_dtype
        return widest(self.param_dtype, value) if isinstance(value, np.dtype) else self.param_dtype

    def multiplies(self, value: "np.dtype | Policy | Recipe | None") -> Recipe | None:
        """Finds the float8 recipe of a linear layer from the value of the rule that decides it; None: no rule.

        A recipe is the result itself; a policy has its own `products`. Without a rule, the result is this policy's
        `products`. A dtype gives None: the layer multiplies in its compute dtype.
        """
        if isinstance(value, Policy) or value is None:
            return (value or self).products
        return value if isinstance(value, Recipe) else None

    @property
    def recipes(self) -> frozenset[Recipe]:
        """All float8 recipes that the policy or one of its rules names; empty if no product is in float8."""
        return frozenset(filter(None, (self.products, *map(self.multiplies, self.rules.values()))))

    @property
    def dtypes(self) -> frozenset[np.dtype]:
        """All parameter, compute and output dtypes that the policy and its rules name.

        `reduce_dtype` and the float8 dtypes of recipes are left out.
        """
        policies = [value for value in (self, *self.rules.values()) if isinstance(value, Policy)]
        named = {value for value in self.rules.values() if isinstance(value, np.dtype)}
        return frozenset(
            named.union(*((policy.param_dtype, policy.compute_dtype, policy.output_dtype) for policy in policies))
        )

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
    """Converts the value of a rule to a recipe, a policy or a dtype, in this order.

    The name of a recipe gives the recipe. A `jmp.Policy`, or a text with `=` such as `"params=float32"`, gives a
    policy. Any other text is the name of a dtype: `"float32"` is the dtype, not the preset of that name.

    Raises:
      UsageError: the text is invalid, or the policy has rules itself.
    """
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
    """Converts a `jmp.Policy` with its three dtypes; `reduce_dtype`, `rules` and `products` get their defaults."""
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def parse_policy(text: str) -> Policy:
    """Parses the text of a policy, such as `"params=float32,compute=float16,output=float32;stem/*=float32"`.

    The part before the first `;` is jmp's grammar, with short keys (`p`, `c`, `o`), and the further keys reduce (`r`)
    and products. A missing key has the default of `Policy`: params is float32, compute equals params, output equals
    compute. A rule, `pattern=dtype`, `pattern=recipe` or `pattern=policy`, follows each `;`. Names of presets are not
    known here; `get_policy` knows them.

    Raises:
      UsageError: a key, dtype or recipe is unknown, a key is given twice, a part has no value, or a rule no `=`.
    """
    head, *tail = split_rules(text)
    return dataclasses.replace(_parse_dtypes(head), rules=parse_rules(tail))


def split_rules(text: str) -> list[str]:
    """Splits a text at its semicolons, strips white space and drops empty parts; `[""]` if nothing is left."""
    return [part.strip() for part in text.split(";") if part.strip()] or [""]


def parse_rules(parts: list[str]) -> Rules:
    """Splits texts such as `"stem/*=float32"` at their first `=` into patterns and values, which stay texts.

    Raises:
      UsageError: a text has no `=`, or a pattern is empty or given twice.
    """
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
