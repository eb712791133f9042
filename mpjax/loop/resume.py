"""Restores a checkpoint into a training state of any policy: casts where dtypes differ, and warns of lost values."""

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mpjax.errors import PrecisionWarning, UsageError
from mpjax.models.scan import in_form_of
from mpjax.precision.dtypes import FLOAT32, is_floating, path_name, widest
from mpjax.precision.eight_bit_moments import DynamicCodes, LinearCodes, decoded, encoded
from mpjax.precision.float8.history import is_history
from mpjax.precision.float8.moments import Grouped, grouped, ungrouped


SCALER = ("opt_state/scale", "opt_state/good_steps", "opt_state/consecutive_skips", "opt_state/finite")


def adopt(state, saved: Mapping[str, Any], *, same_scaling: bool = True, same_moments: bool = True):
    """Restores the values of a checkpoint in a copy of `state`, in the dtypes and on the devices of `state`.

    Blocks are stacked, or stacks are split, as the model of `state` has them. Parameters of a wider dtype, or of the
    other half precision, are restored from the saved float32 master weights. Without master weights they are restored
    from the sum of the parameters and their compensations, if there are any. Master weights and moving averages that
    the checkpoint lacks are restored from its parameters, or from its master weights where these have more bits.
    Moments are converted to float8, or from float8, as `state` has them.

    Args:
      state: a `TrainState` of the run to resume, with initial values, or with shapes and shardings. Other leaves of the
        optimizer state, and histories of float8 scales, that the checkpoint lacks or has in another shape stay as they
        are. But new counters of schedules and of stochastic rounding start at the checkpoint's step. Moments of which
        one kind is new, such as the squares of Adam, start afresh together with their counter.
      saved: arrays by path, from `read_checkpoint`, on the host or on the devices of `places_in`.
      same_scaling: True if the checkpoint's run scaled the loss as this run does. Otherwise the loss scale and its
        counters keep their initial values, without a warning.
      same_moments: False if the moments of the checkpoint's rule mean other things than those of this run's rule, under
        the same names. All of them then keep their initial values, and counters of schedules start at the step.

    Warns:
      PrecisionWarning: the checkpoint lacks loss-scale or other optimizer state, or histories of float8 scales, which
        keep their initial values; or values overflow or flush to zero in the dtypes of `state`.

    Raises:
      UsageError: parameters, or statistics other than histories, are missing, unexpected or of another shape; the
        message lists the first 20.
    """
    saved = {_plain(path): value for path, value in saved.items()}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [_plain(path_name(path)) for path, _ in leaves]
    saved = in_form_of(_with_frozen_blocks(saved, names), filter(_is_of_model, names))
    targets = dict(zip(names, (leaf for _, leaf in leaves), strict=True))
    _refuse_other_model(targets, saved)
    saved = with_moments(with_weights(saved, targets), targets)

    values = {name: _find(name, leaf, saved) for name, leaf in targets.items()}
    if not same_moments:
        values |= dict.fromkeys(filter(_is_of_rule, values))
    afresh = _with_new_moments(values)
    missing, lossy, restored = [], [], []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        value = None if name in afresh or (name in SCALER and not same_scaling) else values[name]
        if value is None and name not in afresh and name.endswith((_COUNT, *_SEEDS)):
            # A schedule or stochastic rounding that is new to this run continues at the run's step, not at 0.
            value = saved.get("step")
        if value is None:
            missing += [] if name in SCALER and not same_scaling else [name]
            restored.append(leaf)
            continue
        lossy += _losses(name, value, leaf)
        restored.append(_place(value, leaf))
    if any(name in SCALER for name in missing):
        _warn("the checkpoint has no loss-scale state: the scale starts at its initial value")
    if others := [name for name in missing if name not in SCALER]:
        _warn(f"not in the checkpoint, so they start afresh: {', '.join(others[:8])}{' …' if others[8:] else ''}")
    if lossy:
        _warn("values that the dtypes of this run cannot represent: " + "; ".join(lossy))
    return jax.tree.unflatten(treedef, restored)


def _plain(path: str) -> str:
    """Replaces repeated `/inner_state` in a path by one: each wrapper of an optimizer (master weights) adds one."""
    return re.sub(r"(/inner_state)+", "/inner_state", path)


def _with_frozen_blocks(saved: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Copies the arrays of a checkpoint, with copies of the parameters of frozen blocks that other blocks have.

    These are master weights and moving averages, which are the parameter itself, and compensations, which are 0. Blocks
    can only be stacked if each has them. Parameters at a path in `wanted` stay in their form and need none.
    """
    completed = dict(saved)
    stacked = [path.removeprefix(PARAMS) for path in saved if path.startswith(PARAMS) and path not in wanted]
    for prefix in (MASTERS, AVERAGES, _COMPENSATION):
        known = {_of_any_block(path): array.dtype for path, array in saved.items() if path.startswith(prefix)}
        for name in stacked:
            dtype = known.get(_of_any_block(prefix + name))
            if dtype is not None and prefix + name not in saved:
                array = saved[PARAMS + name]
                completed[prefix + name] = (array * 0 if prefix == _COMPENSATION else array).astype(dtype)
    return completed


def _of_any_block(path: str) -> str:
    return re.sub(r"/\d+(?=/)", "/*", path)


def _find(name: str, leaf, saved: Mapping[str, Any]) -> Any:
    """The saved array to restore the leaf at path `name` from; None if there is none of its shape.

    It is the array of that path. Master weights and moving averages that were not saved come from the parameter, and a
    parameter that needs more bits than were saved comes from its master weight.
    """
    if name not in saved and name.startswith((MASTERS, AVERAGES)):
        name = PARAMS + name.removeprefix(MASTERS).removeprefix(AVERAGES)
    master = MASTERS + name.removeprefix(PARAMS)
    if name.startswith(PARAMS) and master in saved and widest(leaf.dtype, saved[name].dtype) != saved[name].dtype:
        name = master
    value = saved.get(name)
    return value if value is None or value.shape == leaf.shape else None


def _is_of_rule(name: str) -> bool:
    """True for the path of a moment or counter of an update rule, inside of what keeps its precision."""
    return name.startswith(RULE) and not name.startswith((MASTERS, _COMPENSATION)) and not name.endswith(_SEEDS)


_COUNT = "/count"
_SEEDS = ("/draws", "/roundings")


def _with_new_moments(values: Mapping[str, Any]) -> set[str]:
    """Lists the paths of moments that start afresh, and of their counters.

    A rule such as Adam divides its moments by what their counter says about their sums, so new moments need a counter
    of 0. Moments of one counter start afresh together if there is no saved value for one kind of them (`mu`, `nu`). New
    moments of some parameters, such as those that were frozen before, do not make a kind new.

    Args:
      values: the saved value for each path of the state to resume; None where there is none.
    """
    afresh: set[str] = set()
    for counter in (name for name in values if name.endswith(_COUNT)):
        group = counter.removesuffix(_COUNT) + "/"
        kinds: dict[str, list[str]] = {}
        for name in values:
            if name.startswith(group) and name != counter:
                kinds.setdefault(name.removeprefix(group).partition("/")[0], []).append(name)
        if any(all(values[name] is None for name in members) for members in kinds.values()):
            afresh |= {counter, *itertools.chain(*kinds.values())}
    return afresh


def _is_of_model(name: str) -> bool:
    return name.startswith((PARAMS, "stats/")) and not is_history(name)


def _refuse_other_model(wanted: dict, saved: Mapping[str, Any]) -> None:
    """Raises UsageError if the parameters and statistics of two states, by path, differ in their paths or shapes."""

    def model(names):
        return set(filter(_is_of_model, names))

    faults = [f"missing: {name}" for name in sorted(model(wanted) - model(saved))]
    faults += [f"unexpected: {name}" for name in sorted(model(saved) - model(wanted))]
    faults += [
        f"shape: {name} is {saved[name].shape}, wanted {wanted[name].shape}"
        for name in sorted(model(wanted) & model(saved))
        if saved[name].shape != wanted[name].shape
    ]
    if faults:
        shown = "\n  ".join(faults[:20] + ([f"and {len(faults) - 20} more"] if faults[20:] else []))
        raise UsageError(f"the checkpoint is of another model:\n  {shown}")


def places_in(state) -> Callable[[str, tuple[int, ...]], Sharding]:
    """Makes a function `(path, shape) -> sharding` that places a checkpoint's arrays on the devices of `state`.

    An array that `state` has in this shape gets its sharding there. An array that `state` lacks, such as a master
    weight, gets the sharding of the parameter that its path ends with, if the shapes agree. Any other array is
    replicated.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    known = {_plain(path_name(path)): leaf for path, leaf in leaves}
    whole = _whole(state.step)

    def sharding_of(name: str, shape: tuple[int, ...]) -> Sharding:
        words = without_field(_plain(name)).split("/")
        names = [_plain(name), *(PARAMS + "/".join(words[start:]) for start in range(1, len(words)))]
        candidates = (known[name] for name in names if name in known)
        return next((leaf.sharding for leaf in candidates if leaf.shape == shape), whole)

    return sharding_of


def _losses(name: str, value, leaf) -> list[str]:
    """Lists, as one text, how many values overflow or flush to zero in the dtype of `leaf`; an empty list for none.

    Only a floating dtype that cannot hold all values of the dtype of `value` is looked at.
    """
    if not is_floating(leaf) or widest(leaf.dtype, value.dtype) == leaf.dtype:
        return []
    if isinstance(value, jax.Array):
        overflow, flushed = map(int, _counter(leaf.dtype, _whole(value))(value))
    else:
        cast = _cast(value, leaf)
        overflow = int(np.sum(np.isinf(cast) & np.isfinite(value)))
        flushed = int(np.sum((cast == 0) & (value != 0)))
    return [f"{name}: {overflow} overflow, {flushed} flush to zero in {leaf.dtype}"] if overflow or flushed else []


@functools.cache
def _counter(dtype: np.dtype, whole: NamedSharding) -> Callable:
    """Makes a jitted function from an array to two counts: its values that overflow in `dtype`, or flush to zero.

    The function is cached. Its results have the sharding `whole`, so that every process can read them.
    """

    def counts(x):
        cast = x.astype(dtype)
        return jnp.sum(jnp.isinf(cast) & jnp.isfinite(x)), jnp.sum((cast == 0) & (x != 0))

    return jax.jit(counts, out_shardings=whole)


def _place(value, leaf):
    """Casts a value to the dtype of `leaf` and puts it on the devices of `leaf`, in the same sharding."""
    cast = value.astype(leaf.dtype) if isinstance(value, jax.Array) else _cast(value, leaf)
    return jax.device_put(cast, leaf.sharding)


def _whole(array: Any) -> NamedSharding:
    """The sharding that replicates an array on all devices of the mesh of `array`."""
    return NamedSharding(array.sharding.mesh, PartitionSpec())


def _cast(value: np.ndarray, leaf) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):  # reported by _losses
        return value.astype(leaf.dtype)


def _warn(text: str) -> None:
    warnings.warn(text, PrecisionWarning, stacklevel=3)


PARAMS = "params/"
AVERAGES = "ema/"
RULE = "opt_state/inner_state/"
MASTERS = RULE + "masters/"
_COMPENSATION = RULE + "compensation/"

_STORED = (Grouped, DynamicCodes, LinearCodes)
"""The types of stored moments; the first field of each has the shape of the moment, and a name that no other has."""


def with_weights(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the arrays of a checkpoint, and adds master weights and compensations that the other arrays determine.

    A compensation is what rounding removed from a parameter (Kahan summation). A master weight is the sum of a
    parameter and its compensation. A compensation in `wanted` that was not saved, or in another dtype, becomes the
    difference between the master weight, or else the saved parameter, and the rounded parameter.

    Args:
      saved: the arrays of a checkpoint, by path.
      wanted: the leaves of the state to resume, by path.
    """
    completed = dict(saved)
    for path, rest in saved.items():
        name = path.removeprefix(_COMPENSATION)
        if name != path and PARAMS + name in saved:
            completed.setdefault(MASTERS + name, _sum(saved[PARAMS + name].astype(FLOAT32), rest.astype(FLOAT32)))
    for path, leaf in wanted.items():
        name = path.removeprefix(_COMPENSATION)
        is_there = path in saved and saved[path].dtype == leaf.dtype
        if name != path and PARAMS + name in saved and not is_there:
            completed[path] = _left_over(saved[PARAMS + name], completed.get(MASTERS + name), leaf.dtype)
    return completed


def _sum(param: Any, rest: Any) -> Any:
    """Adds the compensation `rest` to a parameter, in their dtype; where it is 0, every bit stays, even of -0.0."""
    choose = jnp.where if isinstance(param, jax.Array) else np.where
    return choose(rest == 0, param, param + rest)


def _left_over(param: Any, master: Any, dtype: np.dtype) -> Any:
    """Computes the compensation of a parameter, in `dtype`: its exact value minus its value rounded to `dtype`.

    The exact value is the master weight or, if `master` is None, the saved parameter. The rounded value is the saved
    parameter itself if it has `dtype`.
    """
    exact = param if master is None else master
    stored = param if param.dtype == dtype else exact
    with np.errstate(over="ignore", under="ignore"):  # _losses reports the losses of the parameter itself
        return (exact.astype(FLOAT32) - stored.astype(dtype).astype(FLOAT32)).astype(dtype)


def with_moments(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the arrays of a checkpoint, with moments also as `wanted`, the leaves of the resumed state, has them.

    A moment that `wanted` stores otherwise than `saved` does, in float32, bfloat16, float8 or 8-bit codes, is added as
    `wanted` stores it. Both map paths to arrays.
    """
    converted = dict(saved)
    for path in wanted.keys() - saved.keys():
        name, _, field = path.rpartition("/")
        kind = next((kind for kind in _STORED if field == kind._fields[0]), None)
        if kind and (whole := _whole_moment(name, saved)):
            like, moment = whole
            stored = _beside(like, _encoded(kind, moment, None if kind is Grouped else wanted[path].dtype))
            converted |= {f"{name}/{field}": array for field, array in zip(kind._fields, stored, strict=True)}
        elif whole := _whole_moment(path, saved):
            converted[path] = _beside(*whole)
    return converted


def _whole_moment(name: str, saved: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """A saved array of the shape of a moment, and the moment itself; None if it was not saved."""
    if name in saved:
        return saved[name], saved[name].astype(FLOAT32)
    for kind in _STORED:
        if f"{name}/{kind._fields[0]}" in saved:
            stored = kind(*(saved[f"{name}/{field}"] for field in kind._fields))
            return stored[0], _decoded(stored)
    return None


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encoded(kind: Any, moment: Any, dtype: np.dtype | None) -> Any:
    if kind is Grouped:
        return grouped(moment, jnp.uint32(0))
    return encoded(moment, jnp.uint32(0), dtype, "dynamic" if kind is DynamicCodes else "linear")


@jax.jit
def _decoded(stored: Any) -> Any:
    return ungrouped(stored) if isinstance(stored, Grouped) else decoded(stored)


def _beside(like: Any, tree: Any) -> Any:
    """Puts the arrays of the pytree `tree` where `like` is: on the host, or on its devices.

    On devices, arrays of the shape of `like` get its sharding, and others stay where they are.
    """
    if not isinstance(like, jax.Array):
        return jax.device_get(tree)
    return jax.tree.map(lambda x: jax.device_put(x, like.sharding) if x.shape == like.shape else x, tree)


def without_field(path: str) -> str:
    """Removes the field of a stored moment, such as `/values`, from the end of a path; other paths are unchanged."""
    name, _, field = path.rpartition("/")
    return name if any(field in kind._fields for kind in _STORED) else path
