"""Policy: in which dtypes parameters live, operations compute, outputs leave and gradients are summed."""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from mpjax.errors import UsageError
from mpjax.precision.dtypes import FLOAT32, as_dtype, widest
from mpjax.precision.rules import Rules


T = TypeVar("T")

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
    **dict.fromkeys(("r", "reduce"), "reduce_dtype"),
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes for parameters, computation, outputs and cross-device sums, with exceptions by module.

    Every dtype argument takes a name or a dtype. `str(policy)` parses back to an equal policy.

    Args:
      param_dtype: in which parameters are stored; float32 by default.
      compute_dtype: in which convolutions and matrix products run; by default as the parameters.
      output_dtype: in which the model's outputs (logits) leave; by default as the computation.
      reduce_dtype: in which gradients are summed across devices; by default the parameters', at least float32.
      rules: ordered mapping from module pattern (see `Rules`) to a dtype or a policy. A dtype sets what the matched
        modules compute in, and stores their parameters no narrower than that; a policy sets their parameters,
        computation and output.

    Raises:
      UsageError: an unknown dtype, a bad pattern, or rules inside a rule's policy.
    """

    param_dtype: Any = FLOAT32
    compute_dtype: Any = None
    output_dtype: Any = None
    reduce_dtype: Any = None
    rules: Any = ()

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

    @property
    def jmp(self) -> jmp.Policy:
        """The equivalent `jmp.Policy` (which knows neither `reduce_dtype` nor rules)."""
        fields = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return jmp.Policy(*(getattr(jnp, dtype.name) for dtype in fields))

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `param_dtype`; integers, keys and other leaves stay as they are."""
        return self.jmp.cast_to_param(tree)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `compute_dtype`; integers, keys and other leaves stay as they are."""
        return self.jmp.cast_to_compute(tree)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `output_dtype`; integers, keys and other leaves stay as they are."""
        return self.jmp.cast_to_output(tree)

    def __str__(self) -> str:
        parts = [f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"]
        if self.reduce_dtype != widest(self.param_dtype, FLOAT32):
            parts[0] += f",reduce={self.reduce_dtype}"
        parts += [f"{pattern}={value}" for pattern, value in self.rules.items()]
        return ";".join(parts)


def _rule_value(value) -> np.dtype | Policy:
    """A rule's dtype or policy; a name that is both (`"float32"`) is the dtype."""
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
    """The `Policy` with the three dtypes of a `jmp.Policy`."""
    return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)


def parse_policy(text: str) -> Policy:
    """Reads `"params=float32,compute=float16,output=float32;stem/*=float32"`, jmp's grammar plus reduce and rules.

    As in jmp, keys may be short (`p`, `c`, `o`; also `r` for reduce), missing params are float32, missing compute is
    as params, and missing output is as compute. After each `;` stands a rule, `pattern=dtype` or `pattern=policy`.

    Raises:
      UsageError: an unknown key, a key given twice, or a part without a value; the message names the part.
    """
    head, *tail = split_rules(text)
    return dataclasses.replace(_parse_dtypes(head), rules=parse_rules(tail))


def split_rules(text: str) -> list[str]:
    """The parts between semicolons; empty ones, as after a last semicolon, are left out."""
    return [part.strip() for part in text.split(";") if part.strip()] or [""]


def parse_rules(parts: list[str]) -> Rules:
    """Reads `["stem/*=float32", …]`."""
    pairs = []
    for part in parts:
        pattern, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"bad rule '{part}': wanted pattern=dtype, as in 'stem/*=float32'")
        pairs.append((pattern.strip(), value.strip()))
    return Rules(pairs)


def _parse_dtypes(text: str) -> Policy:
    fields: dict[str, np.dtype] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        field = _KEYS.get(key.strip().lower())
        if field is None or not equals or not value.strip():
            raise UsageError(
                f"bad part '{part.strip()}' in policy '{text}': wanted params=, compute=, output= or reduce= "
                "and a dtype, as in 'params=float32,compute=float16,output=float32'"
            )
        if field in fields:
            raise UsageError(f"contradictory policy '{text}': {field} is given twice; keep one")
        fields[field] = as_dtype(value)
    return Policy(**fields)
