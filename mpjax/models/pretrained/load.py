"""What a cast of an array to another floating dtype loses, counted."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import UsageError
from mpjax.models.pretrained.files import find_files
from mpjax.models.pretrained.layouts.entry import Entry
from mpjax.models.pretrained.match import Match, match_arrays
from mpjax.models.pretrained.report import PretrainedReport, Row
from mpjax.models.pretrained.tensors import Tensor, open_tensors, variables_of
from mpjax.precision.modules import stored_dtypes
from mpjax.precision.policy import Policy


if TYPE_CHECKING:
    from flax import nnx


_CHUNK = 2**20


class Losses(NamedTuple):
    """Of one array in one cast.

    Attributes:
      nonfinite: NaN and inf before the cast.
      overflow: finite values that become inf.
      flushed: values other than zero that become zero.
      error: the largest relative error of all other values.
    """

    nonfinite: int
    overflow: int
    flushed: int
    error: float


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest; itself if it is in that dtype."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # told by `losses`
        return array.astype(dtype, copy=False)


def losses(array: np.ndarray, dtype: np.dtype) -> Losses:
    """Counts what `cast(array, dtype)` loses, in pieces, so that no second array of this size is made."""
    counts = np.zeros(3, np.int64)
    error = 0.0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        # float64 holds every value of the dtypes that a file of weights has.
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
    """Puts weights from safetensors files into `model`, in place, in the dtypes that `policy` stores.

    Nothing is written unless everything fits. Tensors are read one at a time.

    Args:
      model: an NNX module, also an abstract one from `nnx.eval_shape`, which then never has initial values.
      path: a `.safetensors` file, a folder with one or with the parts and their index, or an id of the Hugging Face
        hub.
      policy: parameters are stored as `apply_policy(model, policy)` would, rules included, statistics at least in
        float32; None: in the dtypes they have now.
      layout: "mpjax" for files of `export_safetensors` (any model); "huggingface" or "timm" for models that these
        libraries have; None: found from the keys.
      allow_lossy: take values that the stored dtype cannot hold as inf or zero.
      skip: patterns of paths to leave at their initial values, `("head/*",)`, as for another number of classes; or of
        keys in the file to leave unread.

    Returns:
      A `PretrainedReport`: prints as a table and iterates over rows (`path`, `key`, `shape`, `before`, `after`,
      `overflow`, `flushed`, `error`), one for each variable of the model.

    Raises:
      UsageError: a pickle; nothing at `path`; keys that are missing, unexpected or mis-shaped, all of them listed; NaN
        or inf in the file; values that overflow or flush to zero, without `allow_lossy`.
    """
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise UsageError(f"load_pretrained takes a Flax NNX module, got {type(model).__name__}")
    variables = variables_of(model)
    dtypes = {name: np.dtype(variable.get_value().dtype) for name, variable in variables.items()}
    if policy is not None:
        dtypes |= {name: dtype for name, dtype in stored_dtypes(model, policy).items() if name in dtypes}
    files = find_files(path)
    with open_tensors(files) as tensors:
        fit = match_arrays(model, tensors, layout=layout, skip=skip)
        rows = tuple(_checked(fit, variables, dtypes, allow_lossy=allow_lossy))
        for name, array in _read(fit):
            variables[name].set_value(_like(variables[name].get_value(), cast(array, dtypes[name])))
    source = files[0] if len(files) == 1 else files[0].parent
    return PretrainedReport(str(source), fit.layout.name, rows, fit.ignored)


def _read(fit: Match) -> Iterator[tuple[str, np.ndarray]]:
    """Path and numbers of each variable that the file has, as the file has them, in our arrangement."""
    for name, tensor in fit.tensors.items():
        yield name, read_entry(tensor, fit.layout.entries[name])


def read_entry(tensor: Tensor, entry: Entry) -> np.ndarray:
    """What one variable is in a file, in our arrangement."""
    array = tensor.read()
    if entry.part:
        array = np.split(array, entry.part.count, entry.part.axis)[entry.part.index]
    return entry.transform.read(array)


def _checked(
    fit: Match, variables: Mapping[str, Any], dtypes: Mapping[str, np.dtype], *, allow_lossy: bool
) -> Iterator[Row]:
    """The rows of the report.

    Raises:
      UsageError: after the last row: what is not finite in the file, what the cast would lose, what should be tied.
    """
    bad, lossy = [], []
    found = dict(_counted(fit, dtypes))
    for name, variable in variables.items():
        value = variable.get_value()
        if name not in found:
            yield Row(name, None, tuple(value.shape), np.dtype(value.dtype), np.dtype(value.dtype))
            continue
        before, size, lost = found[name]
        key = fit.tensors[name].key
        if lost.nonfinite:
            bad.append(f"{key} ({name}): {lost.nonfinite} of {size} values are NaN or inf in the file")
        if lost.overflow or lost.flushed:
            lossy.append(
                f"{key} ({name}): of {size} values in {before}, {lost.overflow} overflow and {lost.flushed} flush to "
                f"zero in {dtypes[name]}"
            )
        yield Row(name, key, tuple(value.shape), before, dtypes[name], lost.overflow, lost.flushed, lost.error)
    untied = [
        f"{one.key} differs from {other.key}, which the model has in place of both"
        for one, other in fit.tied
        if not np.array_equal(one.read(), other.read())
    ]
    if bad := bad + untied:
        raise UsageError("\n  ".join(["the file has values that cannot be used (nothing was loaded):", *bad]))
    if lossy and not allow_lossy:
        module = lossy[0].partition("(")[2].partition(")")[0].rpartition("/")[0]
        raise UsageError(
            refusal(
                "nothing was loaded",
                lossy,
                f"keep such a module in float32 by a rule: on the command line --precision.rules '{module}' float32, "
                f"in Python Policy(..., rules={{'{module}': 'float32'}}), where allow_lossy=True takes the loss "
                "instead",
            )
        )


def refusal(undone: str, lossy: Sequence[str], advice: str) -> str:
    """The message about values that a cast would lose."""
    more = [f"and {len(lossy) - _SHOWN} more"] if lossy[_SHOWN:] else []
    listed = "\n  ".join([*lossy[:_SHOWN], *more])
    return f"values that the stored dtype cannot hold ({undone}):\n  {listed}\n{advice}"


def _counted(fit: Match, dtypes: Mapping[str, np.dtype]):
    for name, array in _read(fit):
        if jnp.issubdtype(array.dtype, jnp.floating):
            yield name, (array.dtype, array.size, losses(array, dtypes[name]))
        else:
            yield name, (array.dtype, array.size, losses(np.zeros(0, np.float32), np.dtype(np.float32)))


def _like(old, new: np.ndarray):
    """`new` where `old` is."""
    sharding = getattr(old, "sharding", None)
    # A copy: the buffers of a training state are donated, and must be nobody else's.
    return jax.device_put(new, sharding, may_alias=False)
