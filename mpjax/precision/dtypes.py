"""Floating-point dtypes: their names and ranges, and checks that arrays have the ones they were promised to have."""

import dataclasses
import difflib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpjax.errors import DtypeError, UsageError


FLOAT16 = np.dtype(jnp.float16)
BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(jnp.float32)
FLOAT64 = np.dtype(jnp.float64)
HALF = (FLOAT16, BFLOAT16)

_SPELLINGS = {
    FLOAT16: ("float16", "f16", "fp16"),
    BFLOAT16: ("bfloat16", "bf16"),
    FLOAT32: ("float32", "f32", "fp32", "full"),
    FLOAT64: ("float64", "f64", "fp64", "double"),
}
_BY_NAME = {spelling: dtype for dtype, spellings in _SPELLINGS.items() for spelling in spellings}


def as_dtype(spec: DTypeLike) -> np.dtype:
    """The floating dtype that `spec` names.

    Args:
      spec: a dtype, a scalar type, or a name such as `"bfloat16"`, `"bf16"`, `"f32"` (case, spaces, `-` and `_`
        forgiven).

    Raises:
      UsageError: the name is unknown, depends on a device ("half"), or is no floating dtype of 16, 32 or 64 bits.
    """
    if isinstance(spec, str):
        name = "".join(spec.lower().replace("_", "").replace("-", "").split())
        if name == "half":
            raise UsageError("dtype 'half' differs from device to device: write 'float16' or 'bfloat16'")
        if name in _BY_NAME:
            return _BY_NAME[name]
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"; did you mean '{_BY_NAME[near[0]].name}'?" if near else ""
        raise UsageError(f"unknown dtype '{spec}': wanted one of {', '.join(d.name for d in _SPELLINGS)}{hint}")
    try:
        dtype = np.dtype(spec)
    except TypeError:
        dtype = None
    if dtype is None or spec is None:  # np.dtype(None) is float64
        raise UsageError(f"not a dtype: {spec!r}; wanted one of {', '.join(d.name for d in _SPELLINGS)}")
    if dtype not in _SPELLINGS:
        raise UsageError(f"dtype {dtype.name} is not for a policy: wanted one of {', '.join(map(str, _SPELLINGS))}")
    return dtype


def is_floating(leaf) -> bool:
    """Whether `leaf` is an array (or its abstract shape) of a real floating dtype; Python numbers are not."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def widest(*dtypes: DTypeLike) -> np.dtype:
    """The narrowest dtype that holds all of them: float16 with bfloat16 gives float32."""
    with jax.numpy_dtype_promotion("standard"):  # asked for here, so also where the user made promotion strict
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def require_x64(*dtypes: DTypeLike) -> None:
    """Raises UsageError when one of `dtypes` is float64 and JAX would silently give float32 instead."""
    if FLOAT64 in [np.dtype(dtype) for dtype in dtypes] and jax.dtypes.canonicalize_dtype(FLOAT64) != FLOAT64:
        raise UsageError("float64 needs 64-bit JAX: call jax.config.update('jax_enable_x64', True) before any array")


@dataclasses.dataclass(frozen=True)
class Range:
    """The representable band of a dtype, as Python floats."""

    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


def float_range(spec: DTypeLike) -> Range:
    """The representable band: `float_range("float16").largest` is 65504.0."""
    info = jnp.finfo(as_dtype(spec))
    return Range(float(info.max), float(info.tiny), float(info.smallest_subnormal), float(info.eps))


def slow_half_reason(dtype: DTypeLike, device) -> str | None:
    """Why `dtype` brings no speed on `device` (a `jax.Device`), or None where the hardware computes fast in it.

    Sources: CUDA C++ Programming Guide, table of arithmetic throughput by compute capability (float16 tensor cores
    from 7.0, bfloat16 from 8.0); TPU system architecture (bfloat16 matrix units).
    """
    dtype = as_dtype(dtype)
    if dtype not in HALF:
        return None
    if device.platform == "cpu":
        return f"a CPU has no fast {dtype.name}: results are right, but expect no speed-up over float32"
    if device.platform == "tpu":
        return None if dtype == BFLOAT16 else "a TPU computes fast in bfloat16 only: use mixed_bfloat16"
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD's is a name, "gfx942"
        return None
    needed = 7.0 if dtype == FLOAT16 else 8.0
    if capability < needed:
        return f"{device.device_kind} (compute capability {capability}) has no fast {dtype.name}: it needs {needed}"
    return None


def path_name(path: tuple) -> str:
    """A pytree key path with `/` between its parts, as module paths are written."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_dtypes(tree, dtype: DTypeLike, *, name: str = "tree") -> None:
    """Raises when a floating leaf of `tree` has another dtype than wanted.

    Args:
      tree: any pytree of arrays or abstract arrays; integers, booleans and keys are not looked at.
      dtype: what every floating leaf should have, a name or a dtype.
      name: what to call the tree in the message.

    Raises:
      DtypeError: names every offending leaf by path, with what it has and what was wanted.
    """
    wanted = as_dtype(dtype)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_floating(leaf) and leaf.dtype != wanted
    ]
    if offenders:
        raise DtypeError(
            f"{name}: {len(offenders)} leaves are not {wanted}:\n" + "\n".join(offenders) + f"\nwanted: {wanted}"
        )


def check_same_dtypes(one, other, *, names: tuple[str, str]) -> None:
    """Raises when a leaf of one tree has another dtype than that of the other; Python numbers have none.

    Args:
      one: any pytree.
      other: a pytree of the same structure.
      names: what to call them in the message.

    Raises:
      DtypeError: names every such leaf by path.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=False)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {names[0]} {a.dtype}, {names[1]} {b.dtype}"
        for (path, a), b in pairs
        if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype
    ]
    if offenders:
        raise DtypeError(f"{len(offenders)} leaves differ in dtype; cast one of the two:\n" + "\n".join(offenders))
