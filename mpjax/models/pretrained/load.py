"""Loads safetensors files into a model and counts the losses of the casts to its dtypes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.models.pretrained.files import StackedTensor, Tensor, find_files, open_tensors, variables_of
from mpjax.models.pretrained.layouts.entry import FileEntry
from mpjax.models.pretrained.match import Match, match_arrays
from mpjax.models.pretrained.other_networks import refuse_other_networks
from mpjax.models.pretrained.report import PretrainedReport, WeightRow
from mpjax.models.scan import Stacks, names_apart, one_by_one, stack_of, stacks_of
from mpjax.precision.modules import stored_dtypes
from mpjax.precision.policy import Policy


if TYPE_CHECKING:
    from flax import nnx


_CHUNK = 2**20


class Losses(NamedTuple):
    """What a cast loses of one array.

    Attributes:
      nonfinite: the number of NaN and inf before the cast.
      overflow: the number of finite values that become inf.
      flushed: the number of nonzero values that become zero.
      error: the largest relative rounding error of all other values, as a fraction.
    """

    nonfinite: int
    overflow: int
    flushed: int
    error: float


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts `array` to `dtype`, rounding to nearest. An array of this dtype is returned itself, not a copy."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # `losses` counts them
        return array.astype(dtype, copy=False)


def losses(array: np.ndarray, dtype: np.dtype) -> Losses:
    """Counts the values that `cast(array, dtype)` would lose, and finds the largest relative error of the others.

    If the array has this dtype already, only NaN and inf are counted. Works in chunks to avoid a second array of this
    size.
    """
    counts = np.zeros(3, np.int64)
    error = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        # float64 represents every value of the dtypes in `FLOATING` exactly.
        before = flat[start : start + _CHUNK].astype(np.float64)
        finite = np.isfinite(before)
        counts[0] += before.size - np.count_nonzero(finite)
        if dtype == array.dtype:
            continue
        after = cast(flat[start : start + _CHUNK], dtype).astype(np.float64)
        overflow = finite & ~np.isfinite(after)
        flushed = (before != 0) & (after == 0)
        counts[1:] += np.count_nonzero(overflow), np.count_nonzero(flushed)
        kept = finite & ~overflow & ~flushed & (before != 0)
        relative = np.abs(after[kept] - before[kept]) / np.abs(before[kept])
        error = max(error, float(relative.max(initial=0.0)))
    nonfinite, overflow, flushed = map(int, counts)
    return Losses(nonfinite, overflow, flushed, error)


_SHOWN = 20


def load_pretrained(
    model: "nnx.Module",
    path: str | os.PathLike,
    *,
    policy: str | Policy | None = None,
    layout: str | None = None,
    allow_lossy: bool = False,
    skip: Sequence[str] = (),
) -> PretrainedReport:
    """Loads weights from safetensors files into `model`, in place, in the parameter dtypes of `policy`.

    The model changes only if everything fits. Tensors are read one at a time. Each array gets the sharding of the array
    that it replaces.

    Args:
      model: an NNX module. It may be abstract (from `nnx.eval_shape`), so that no initial values are computed.
      path: a `.safetensors` file, a folder with one or with several and their index, or an id of the Hugging Face hub,
        which is downloaded unless it is in the hub's cache.
      policy: the policy of the stored dtypes, the same as after `apply_policy(model, policy)`, rules included;
        statistics are at least float32. None: the current dtypes.
      layout: "mpjax" for files of `export_safetensors` (any model); "huggingface" or "timm" for models that these
        libraries have; None: the layout that the keys of the file match best.
      allow_lossy: whether values may overflow to inf or flush to zero in the stored dtype.
      skip: patterns of paths to leave at their initial values, such as `("head/*",)` for another number of classes,
        or of keys in the file to leave unread.

    Returns:
      A `PretrainedReport`. It prints as a table and iterates over rows (`path`, `key`, `shape`, `before`, `after`,
      `overflow`, `flushed`, `error`), one for each variable of the model.

    Raises:
      UsageError: `path` is a pickle or does not exist; the layout or a pattern of `skip` fits nothing; tensors are
        missing, unexpected or of another shape or dtype (up to 20 of each are listed); the file has NaN or inf, or two
        tied tensors that differ; a config.json beside the file names a network with the same tensors that computes
        something else; values overflow or flush to zero without `allow_lossy`; or the model is abstract, its
        blocks are stacked, and `skip` leaves out some of them.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(f"load_pretrained takes a Flax NNX module, got {type(model).__name__}")
    single, stacks = one_by_one(model), stacks_of(model)
    variables = variables_of(single)
    dtypes = {name: np.dtype(variable.get_value().dtype) for name, variable in variables.items()}
    if policy is not None:
        stored = stored_dtypes(model, policy)
        dtypes |= {row: dtype for name, dtype in stored.items() for row in names_apart(name, stacks) if row in dtypes}
    files = find_files(path)
    with open_tensors(files) as tensors:
        fit = match_arrays(single, tensors, layout=layout, skip=skip)
        refuse_other_networks(files[0], fit.layout)
        rows = tuple(_checked(fit, variables, dtypes, allow_lossy=allow_lossy))
        for name, array in _read(fit):
            variables[name].set_value(_like(variables[name].get_value(), cast(array, dtypes[name])))
    _stack_rows(model, variables, stacks)
    source = files[0] if len(files) == 1 else files[0].parent
    return PretrainedReport(str(source), fit.layout.name, rows, fit.ignored)


def _stack_rows(model: "nnx.Module", rows: Mapping[str, Any], stacks: Stacks) -> None:
    """Sets the arrays of a model with stacked blocks, in place, from the variables of its copy with single blocks.

    `rows` has the variables of the copy (`one_by_one`) by path. Does nothing without stacks: then `rows` are the
    model's own variables.

    Raises:
      UsageError: the model is abstract, and only some blocks were loaded.
    """
    single = {name: variable.get_value() for name, variable in rows.items()} if stacks else {}
    changed = {}
    for name, variable in variables_of(model).items() if stacks else ():
        arrays = [single[row] for row in names_apart(name, stacks)]
        abstract = [isinstance(array, jax.ShapeDtypeStruct) for array in arrays]
        if all(abstract):
            continue
        if any(abstract):
            raise UsageError(
                f"{name} of an abstract model has arrays for some blocks and none for others: skip all blocks or none, "
                "or load into a model with initial values"
            )
        stacked = arrays[0] if stack_of(name, stacks) is None else jnp.stack(arrays)
        changed[name] = _like(variable.get_value(), stacked)
    for name, variable in variables_of(model).items() if changed else ():
        variable.set_value(changed.get(name, variable.get_value()))


def _read(fit: Match) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the path and the values of each variable, in the file's dtype and our axis order and shape."""
    for name, tensor in fit.tensors.items():
        yield name, read_entry(tensor, fit.layout.entries[name])


def read_entry(tensor: Tensor | StackedTensor, entry: FileEntry) -> np.ndarray:
    """Reads a variable from a file, in the file's dtype and our axis order and shape; of a fused tensor, its part."""
    array = tensor.read()
    if entry.part:
        array = np.split(array, entry.part.count, entry.part.axis)[entry.part.index]
    return entry.transform.read(array)


def _checked(
    fit: Match, variables: Mapping[str, Any], dtypes: Mapping[str, np.dtype], *, allow_lossy: bool
) -> Iterator[WeightRow]:
    """Reads all tensors, counts the losses of their casts to `dtypes`, and yields a row of the report per variable.

    A variable without a tensor (skipped) has the key None. The model does not change.

    Raises:
      UsageError: after the last row, if the file has NaN or inf, the cast loses values, or tied tensors differ.
    """
    bad, lossy, lossy_names = [], [], []
    counted = dict(_counted(fit, dtypes))
    for name, variable in variables.items():
        value = variable.get_value()
        if name not in counted:
            yield WeightRow(name, None, tuple(value.shape), np.dtype(value.dtype), np.dtype(value.dtype))
            continue
        before, size, lost = counted[name]
        key = fit.tensors[name].key
        if lost.nonfinite:
            bad.append(f"{key} ({name}): {lost.nonfinite} of {size} values are NaN or inf in the file")
        if lost.overflow or lost.flushed:
            lossy_names.append(name)
            lossy.append(
                f"{key} ({name}): of {size} values in {before}, {lost.overflow} overflow and {lost.flushed} flush to "
                f"zero in {dtypes[name]}"
            )
        yield WeightRow(name, key, tuple(value.shape), before, dtypes[name], lost.overflow, lost.flushed, lost.error)
    untied = [
        f"{tensor.key} differs from {other.key}, but the model shares one array for both"
        for tensor, other in fit.tied
        if not np.array_equal(tensor.read(), other.read())
    ]
    if bad := bad + untied:
        raise UsageError("\n  ".join(["the file has values that cannot be used (nothing was loaded):", *bad]))
    if lossy and not allow_lossy:
        module = lossy_names[0].rpartition("/")[0]
        raise UsageError(
            refusal(
                "nothing was loaded",
                lossy,
                f"keep the module in float32 with a rule: on the command line --precision.rules '{module}' float32, "
                f"in Python Policy(..., rules={{'{module}': 'float32'}}); in Python allow_lossy=True accepts the loss "
                "instead",
            )
        )


def refusal(undone: str, lossy: Sequence[str], advice: str) -> str:
    """Formats the message about values that a cast would lose.

    Args:
      undone: what did not happen, such as "nothing was loaded".
      lossy: a line for each variable that would lose values; the first 20 are shown.
      advice: what the user can do instead.
    """
    more = [f"and {len(lossy) - _SHOWN} more"] if lossy[_SHOWN:] else []
    listed = "\n  ".join([*lossy[:_SHOWN], *more])
    return f"values that the stored dtype cannot hold ({undone}):\n  {listed}\n{advice}"


def _counted(fit: Match, dtypes: Mapping[str, np.dtype]):
    """Yields `(path, (dtype, number of values, losses))` for each tensor; integers and bools lose nothing."""
    for name, array in _read(fit):
        if jnp.issubdtype(array.dtype, jnp.floating):
            yield name, (array.dtype, array.size, losses(array, dtypes[name]))
        else:
            yield name, (array.dtype, array.size, losses(np.zeros(0, np.float32), np.dtype(np.float32)))


def _like(old, new: np.ndarray | jax.Array):
    """Copies `new` to the devices of `old`, with its sharding; to the default device if `old` has none."""
    sharding = getattr(old, "sharding", None)
    # A copy, because a training step donates these buffers: nothing else may share them.
    return jax.device_put(new, sharding, may_alias=False)
