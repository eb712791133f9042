"""Sums gradients across devices in the `reduce_dtype` of a policy, instead of the dtype of each gradient."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.precision.dtypes import path_name, widest
from mpjax.precision.policy import Policy
from mpjax.precision.presets import get_policy


if TYPE_CHECKING:
    import jmp


T = TypeVar("T")

Axes = str | Sequence[str]
"""The name of a mesh axis, or several names."""


def reduce_gradients(grads: T, policy: "str | Policy | jmp.Policy", axis_name: Axes) -> T:
    """Averages gradients over devices in the policy's `reduce_dtype`, inside `jax.shard_map` or `jax.pmap`.

    Eight float16 gradients of 9,000 sum to inf in float16, and to 72,000 in float32, the default. If each device
    averages the loss over its own examples, the result is the gradient of the loss averaged over all examples.

    >>> import jax, jax.numpy as jnp, mpjax
    >>> grads = {"kernel": jnp.float16([[9000.0], [9008.0]])}
    >>> average = lambda grads: mpjax.reduce_gradients(grads, "mixed_float16", "data")
    >>> jax.vmap(average, axis_name="data")(grads)["kernel"][0]
    Array([9004.], dtype=float32)

    Args:
      grads: a pytree of this device's gradients. Leaves that are neither floating nor complex are not averaged.
      policy: the policy, as for `mpjax.get_policy`.
      axis_name: the name of the mapped axis, or several names.

    Returns:
      The averages, equal on all devices, in the wider of the gradient's dtype and `reduce_dtype`. The sum is in
      `reduce_dtype` even if the gradient is wider: float64 gradients beyond float32's range become inf under a policy
      whose `reduce_dtype` is float32.

    Raises:
      UsageError: there is no mapped axis of that name; or JAX has already summed the gradients in their own dtype. JAX
        does so for parameters that are replicated in a `jax.shard_map` with `check_vma=True`, its default.
    """
    devices = _size(axis_name)
    grads = jax.tree.map(lambda g: g if hasattr(g, "dtype") else jnp.asarray(g), grads)
    _refuse_summed(grads, axis_name)
    dtype = get_policy(policy).reduce_dtype

    def average(gradient):
        if not _is_inexact(gradient):
            return gradient
        total = sum_across(gradient, dtype, axis_name)
        return total / jnp.asarray(devices, total.dtype)

    return jax.tree.map(average, grads)


def _size(axis_name: Axes) -> int:
    """Counts the devices along mapped axes.

    Raises:
      UsageError: no axis is named, or the named axis is not mapped.
    """
    if not axis_name:
        raise UsageError('reduce_gradients: axis_name is empty; name the mapped axis, as in axis_name="data"')
    try:
        return jax.lax.psum(1, axis_name)
    except NameError as error:
        raise UsageError(
            f"reduce_gradients: no axis {axis_name!r} is mapped here; call it inside of jax.shard_map or jax.pmap, "
            "with the name of an axis of theirs"
        ) from error


def sum_across(array: jax.Array, dtype: np.dtype, axis_name: Axes) -> jax.Array:
    """Sums a floating or complex array over the devices of mapped axes, inside `jax.shard_map` or `jax.pmap`.

    The sum is computed in `dtype`. The result has the wider of `dtype` and the array's dtype.
    """
    added = array.astype(_in_reduction(array.dtype, dtype))
    return jax.lax.psum(added, axis_name).astype(widest(array.dtype, dtype))


BUCKET = 8 * 2**20
"""The largest number of bytes of gradients in one collective, unless a single array has more."""


def sum_in_buckets(arrays: Mapping[str, jax.Array], dtype: np.dtype, axis_name: Axes) -> dict[str, jax.Array]:
    """Sums arrays over devices like `sum_across`, but joins consecutive arrays of one dtype in one collective.

    Joined arrays (a bucket) have at most `BUCKET` bytes together. The result has the names, shapes and order of
    `arrays`. XLA combines small sums too. On GPUs it leaves out the sums for which it has its own kernel, and waits for
    each of them. The sum of a bucket runs during the backward pass.
    """
    sums: dict[str, jax.Array] = {}
    for bucket in _buckets(arrays):
        flat = [arrays[name].ravel() for name in bucket]
        whole = sum_across(jnp.concatenate(flat) if len(flat) > 1 else flat[0], dtype, axis_name)
        ends = np.cumsum([len(array) for array in flat])
        for name, flat_sum in zip(bucket, jnp.split(whole, ends[:-1]), strict=True):
            sums[name] = flat_sum.reshape(arrays[name].shape)
    return sums


def _buckets(arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Groups the names of consecutive arrays of one dtype that have at most `BUCKET` bytes together.

    A larger array is a group of its own.
    """
    buckets: list[list[str]] = []
    held = 0
    for name, array in arrays.items():
        held += array.nbytes
        if not buckets or array.dtype != arrays[buckets[-1][0]].dtype or held > BUCKET:
            buckets.append([])
            held = array.nbytes
        buckets[-1].append(name)
    return buckets


def scatter_sum(array: jax.Array, dtype: np.dtype, axis_name: Axes, *, axis: int) -> jax.Array:
    """Sums like `sum_across`, but each device gets only its own shard of the sum, one of equal shards along `axis`.

    The size of the axis must be a multiple of the number of devices.
    """
    added = array.astype(_in_reduction(array.dtype, dtype))
    shard = jax.lax.psum_scatter(added, axis_name, scatter_dimension=axis, tiled=True)
    return shard.astype(widest(array.dtype, dtype))


def _in_reduction(array_dtype: np.dtype, dtype: np.dtype) -> np.dtype:
    """The dtype in which arrays of dtype `array_dtype` are added: `dtype`, or for complex arrays the wider of the two.

    Complex arrays have no half precision.
    """
    return widest(array_dtype, dtype) if jnp.issubdtype(array_dtype, jnp.complexfloating) else dtype


def _refuse_summed(grads, axis_name: Axes) -> None:
    """Raises UsageError if JAX has already summed a gradient over one of the axes.

    The type of such a gradient (`jax.typeof`) does not vary over the axis. With `check_vma=False` no type does.
    """
    axes = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    tracked = varying(jax.lax.axis_index(axis_name))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if _is_inexact(leaf) and (summed := (tracked & axes) - varying(leaf)):
            over = ", ".join(sorted(summed))
            raise UsageError(
                f"reduce_gradients: the gradient {path_name(path)} has been summed over '{over}' already, in the dtype "
                "of each operation: parameters are replicated. Differentiate jax.lax.pcast(params, "
                f"{axis_name!r}, to='varying') instead, or write jax.shard_map(..., check_vma=False)"
            )


def _is_inexact(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def varying(array) -> frozenset[str]:
    """The mesh axes over which the type of a value varies (`jax.typeof`); empty with `check_vma=False`."""
    aval: Any = jax.typeof(array)
    tracked = getattr(aval, "manual_axis_type", None)  # since JAX 0.10; before it, and for a while after, `vma`
    return frozenset(getattr(aval, "vma", ()) if tracked is None else tracked.varying)
