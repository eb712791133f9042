"""Floating-point dtypes: their names, their ranges, which devices compute fast in them, and which a pytree has."""

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
    """Converts `spec` to a floating dtype of 16, 32 or 64 bits.

    Args:
      spec: a dtype, a scalar type, or a name such as `"bfloat16"`, `"bf16"`, `"f32"` (case, spaces, `-` and `_` are
        ignored).

    Raises:
      UsageError: the name is unknown, depends on the device ("half"), or is not a floating dtype of 16, 32 or 64 bits.
    """
    if isinstance(spec, str):
        name = normalised(spec)
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
        raise UsageError(f"a policy cannot use dtype {dtype.name}: wanted one of {', '.join(map(str, _SPELLINGS))}")
    return dtype


def normalised(name: str) -> str:
    """Lowercases a name of a dtype, a recipe or a policy, and removes all white space, `-` and `_`, for comparison."""
    return "".join(name.lower().replace("_", "").replace("-", "").split())


def is_floating(leaf) -> bool:
    """True for an array (concrete or abstract) of a real floating dtype, float8 included; False for a Python number."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def in_float32(tree):
    """Casts the float16 and bfloat16 arrays of a tree to float32; all other leaves stay the same objects."""
    return jax.tree.map(lambda leaf: leaf.astype(FLOAT32) if is_floating(leaf) and leaf.dtype in HALF else leaf, tree)


def widest(*dtypes: DTypeLike) -> np.dtype:
    """Finds the dtype that JAX promotes one or more `dtypes` to: float32 for float16 and bfloat16.

    Equal dtypes give that dtype. Among different dtypes, one of eight bits or less, which JAX does not promote, counts
    as bfloat16: two different float8 dtypes give bfloat16. Strict dtype promotion has no effect here.
    """
    several = {np.dtype(dtype) for dtype in dtypes}
    if len(several) > 1:
        several = {BFLOAT16 if is_narrow(dtype) else dtype for dtype in several}
    with jax.numpy_dtype_promotion("standard"):  # also where the user made promotion strict
        return np.dtype(functools.reduce(jnp.promote_types, several))


def is_narrow(dtype: np.dtype) -> bool:
    """True for a floating dtype of at most eight bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits <= 8


def require_x64(*dtypes: DTypeLike) -> None:
    """Raises UsageError if one of `dtypes` is float64 and `jax_enable_x64` is off, so that JAX would use float32."""
    if FLOAT64 in [np.dtype(dtype) for dtype in dtypes] and jax.dtypes.canonicalize_dtype(FLOAT64) != FLOAT64:
        raise UsageError(
            "float64 needs 64-bit JAX: set JAX_ENABLE_X64=1 in the environment, or in Python call "
            "jax.config.update('jax_enable_x64', True) before any array"
        )


@dataclasses.dataclass(frozen=True)
class Range:
    """The representable range of a dtype: its largest number, its smallest positive numbers and its epsilon."""

    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float


def float_range(spec: DTypeLike) -> Range:
    """Looks up the range of a dtype of 16, 32 or 64 bits: `float_range("float16").largest` is 65504.0.

    Raises UsageError for other dtypes, like `as_dtype`.
    """
    info = jnp.finfo(as_dtype(spec))
    return Range(float(info.max), float(info.tiny), float(info.smallest_subnormal), float(info.eps))


def default_device():
    """Finds the `jax.Device` that JAX computes on by default.

    It is the device that `jax.default_device` sets. If a platform name is set, it is that platform's first local
    device. If nothing is set, it is the first local device.
    """
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def slow_half_reason(dtype: DTypeLike, device) -> str | None:
    """Explains why float16 or bfloat16 is slow on `device` (a `jax.Device`), in a text for the user.

    Every CPU is slow in both dtypes, and a TPU in float16. A GPU is slow if its compute capability is below 7.0 for
    float16, or below 8.0 for bfloat16. The result is None if `dtype` is fast on the device or is not half precision, or
    if the device has no numeric compute capability, as AMD GPUs.

    Sources: CUDA C++ Programming Guide, table of arithmetic throughput by compute capability (float16 tensor cores
    from 7.0, bfloat16 from 8.0); TPU system architecture (bfloat16 matrix units).
    """
    dtype = as_dtype(dtype)
    if dtype not in HALF:
        return None
    if device.platform == "cpu":
        return f"a CPU has no fast {dtype.name}: results are right, but --precision.policy float32 is seldom slower"
    if device.platform == "tpu":
        return None if dtype == BFLOAT16 else "a TPU computes fast in bfloat16 only: use mixed_bfloat16"
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):  # on AMD it is a name, "gfx942"
        return None
    needed = 7.0 if dtype == FLOAT16 else 8.0
    if capability < needed:
        return f"{device.device_kind} (compute capability {capability}) has no fast {dtype.name}: it needs {needed}"
    return None


def path_name(path: tuple) -> str:
    """Joins the keys, indices and attribute names of a pytree key path by `/`; the empty path gives ""."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_dtypes(tree, dtype: DTypeLike, *, name: str = "tree") -> None:
    """Raises DtypeError if a floating leaf of `tree` does not have `dtype`.

    >>> import jax.numpy as jnp, mpjax
    >>> mpjax.check_dtypes({"kernel": jnp.ones(2), "step": jnp.arange(2)}, "float32")
    >>> mpjax.check_dtypes({"kernel": jnp.ones(2), "step": jnp.arange(2)}, "float16", name="params")
    Traceback (most recent call last):
    mpjax.errors.DtypeError: params: 1 leaf is not float16:
      kernel: float32
    wanted: float16

    Args:
      tree: a pytree of arrays or abstract arrays; integers, booleans and keys are ignored.
      dtype: the required dtype of every floating leaf, as a dtype or a name.
      name: the name of the tree in the message.

    Raises:
      DtypeError: lists every offending leaf by path, with its dtype and the required dtype.
    """
    required = as_dtype(dtype)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_floating(leaf) and leaf.dtype != required
    ]
    if offenders:
        count = "1 leaf is" if len(offenders) == 1 else f"{len(offenders)} leaves are"
        raise DtypeError(f"{name}: {count} not {required}:\n" + "\n".join(offenders) + f"\nwanted: {required}")


def check_same_dtypes(one, other, *, names: tuple[str, str]) -> None:
    """Raises DtypeError if corresponding leaves of two trees differ in dtype.

    Leaves are compared in the order of flattening. A pair in which one leaf has no dtype, such as a Python number, is
    ignored.

    Args:
      one: any pytree.
      other: a pytree of the same structure, which is not checked.
      names: the names of the two trees in the message.

    Raises:
      DtypeError: lists every differing leaf by path.
    """
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=False)
    offenders = [
        f"  {path_name(path) or '(the value itself)'}: {names[0]} {a.dtype}, {names[1]} {b.dtype}"
        for (path, a), b in pairs
        if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype
    ]
    if offenders:
        raise DtypeError(f"{len(offenders)} leaves differ in dtype; cast one of the two:\n" + "\n".join(offenders))
