"""Presets: the names of policies, with the loss scaling, master weights and mode that belong to them."""

import dataclasses
import difflib

import jmp

from mpjax.errors import UsageError
from mpjax.precision.dtypes import BFLOAT16, normalised
from mpjax.precision.float8.recipes import DELAYED, FLOAT8, MXFP8, ROWWISE, Recipe
from mpjax.precision.policy import Policy, from_jmp, parse_policy, parse_rules, split_rules
from mpjax.precision.rules import FIRST_OR_LAST, NORM, SMALL_PRODUCT


@dataclasses.dataclass(frozen=True)
class Preset:
    """A policy and the defaults that belong to it.

    Attributes:
      name: the preset's own name.
      policy: the dtypes.
      loss_scale: "none", "dynamic", or "static" (scale 1).
      master_weights: True if the optimizer keeps float32 copies of the half-precision parameters.
      mode: "module" (dtypes set on Flax modules) or "autocast" (casts placed per operation).
      aliases: other names, from Lightning, Keras, Apex, torchao and TransformerEngine.
    """

    name: str
    policy: Policy
    loss_scale: str = "none"
    master_weights: bool = False
    mode: str = "module"
    aliases: tuple[str, ...] = ()


def _with_products(recipe: Recipe) -> Policy:
    """Builds `mixed_bfloat16` with float8 products, except in linear layers that are small, first or last."""
    bfloat16_rules = {FIRST_OR_LAST: BFLOAT16, SMALL_PRODUCT: BFLOAT16}
    return Policy("float32", "bfloat16", "float32", rules=bfloat16_rules, products=recipe)


PRESETS = (
    Preset("float32", Policy("float32"), aliases=("fp32", "f32", "full", "32-true", "32", "O0")),
    Preset("mixed_bfloat16", Policy("float32", "bfloat16", "float32"), aliases=("bf16-mixed", "bf16")),
    Preset(
        "mixed_float16",
        Policy("float32", "float16", "float32"),
        loss_scale="dynamic",
        aliases=("16-mixed", "16", "fp16", "half", "O2"),
    ),
    Preset("O1", Policy("float32", "float16", "float32"), loss_scale="dynamic", mode="autocast"),
    Preset("bfloat16", Policy("bfloat16", "bfloat16", "float32"), master_weights=True, aliases=("bf16-true",)),
    Preset(
        "float16",
        Policy("float16", "float16", "float32"),
        loss_scale="dynamic",
        master_weights=True,
        aliases=("16-true",),
    ),
    Preset("O3", Policy("float16", "float16", "float16", rules={NORM: "float16"}), loss_scale="static"),
    Preset("float64", Policy("float64"), aliases=("64-true", "64", "f64", "fp64")),
    # The names of a recipe in mpjax, torchao and TransformerEngine are names of its policy too.
    Preset("mixed_float8", _with_products(FLOAT8), aliases=("fp8-mixed", "float8-mixed", *FLOAT8.names)),
    Preset("mixed_float8_rowwise", _with_products(ROWWISE), aliases=ROWWISE.names),
    Preset("mixed_float8_delayed", _with_products(DELAYED), aliases=("transformer-engine", *DELAYED.names)),
    Preset("mixed_mxfp8", _with_products(MXFP8), aliases=("mxfp8-mixed", *MXFP8.names)),
)


_BY_NAME = {normalised(name): preset for preset in PRESETS for name in (preset.name, *preset.aliases)}


def find_preset(spec) -> Preset | None:
    """Finds the preset with the name or alias `spec`; rules after a `;` in the text are ignored.

    Case, spaces, `-` and `_` are ignored too. The result is None for an unknown name, and for anything that is not a
    string.
    """
    return _BY_NAME.get(normalised(spec.split(";")[0])) if isinstance(spec, str) else None


def get_policy(spec: "str | Policy | jmp.Policy") -> Policy:
    """Converts `spec`, such as the name of a preset, to a `Policy`, without touching a device.

    A `Policy` is returned as it is. Rules after the name of a preset come before the preset's own rules, and replace a
    rule of the preset with the same pattern.

    >>> import mpjax
    >>> str(mpjax.get_policy("bf16-mixed"))
    'params=float32,compute=bfloat16,output=float32'

    Args:
      spec: a preset (`"mixed_float16"`), an alias (`"bf16-mixed"`, `"O2"`), a jmp string
        (`"params=float32,compute=float16,output=float32"`, `"p=f32,c=bf16"`), any of them followed by rules after
        semicolons (`"mixed_float16;stem/*=float32"`), a `jmp.Policy`, a `Policy`, or a number (16 is `mixed_float16`,
        32 `float32`, 64 `float64`). In names, case, spaces, `-` and `_` are ignored.

    Raises:
      UsageError: no policy has that name (the message lists the presets and suggests the nearest), or a part of `spec`
        is invalid.
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, jmp.Policy):
        return from_jmp(spec)
    if isinstance(spec, int):
        spec = str(spec)
    if not isinstance(spec, str):
        raise UsageError(f"not a policy: {spec!r}; wanted a preset's name, a jmp string, a jmp.Policy or a Policy")
    head, *tail = split_rules(spec)
    if preset := _BY_NAME.get(normalised(head)):
        user_rules = parse_rules(tail)
        usual = {pattern: value for pattern, value in preset.policy.rules.items() if pattern not in user_rules}
        return dataclasses.replace(preset.policy, rules={**user_rules, **usual})
    if "=" in head:
        return parse_policy(spec)
    if normalised(head) == "f16":  # a bare dtype in jmp: that dtype everywhere
        return Policy("float16", rules=parse_rules(tail))
    near = difflib.get_close_matches(normalised(head), _BY_NAME, n=1)
    hint = f"; did you mean '{_BY_NAME[near[0]].name}'?" if near else "."
    raise UsageError(
        f"unknown precision policy '{spec}'{hint} Presets: {', '.join(p.name for p in PRESETS)}; "
        "or write 'params=float32,compute=float16,output=float32'"
    )
