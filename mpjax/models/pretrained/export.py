"""Exports the weights of a model to a safetensors file, in mpjax's layout or in another library's."""

import collections
import os
import pathlib
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from mpjax.errors import CheckpointWarning, UsageError
from mpjax.files import replacing
from mpjax.models.pretrained.files import variables_of
from mpjax.models.pretrained.layouts.entry import ROW, WeightMap
from mpjax.models.pretrained.layouts.families import layouts_of
from mpjax.models.pretrained.load import cast, losses, refusal
from mpjax.models.pretrained.report import PretrainedReport, WeightRow
from mpjax.models.scan import one_by_one
from mpjax.precision.dtypes import FLOAT32, as_dtype, is_floating, widest
from mpjax.precision.float8.history import is_history
from mpjax.precision.module_tree import plain_arrays


def export_safetensors(
    model: nnx.Module,
    path: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    layout: str = "mpjax",
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a model's parameters and statistics to `path` atomically. `load_pretrained` reads them back.

    A file that exists is replaced. The file is the same for single blocks and for blocks in a stack. It does not hold
    plain arrays, such as `self.offsets = jnp.arange(8)`, and a `CheckpointWarning` names them.

    Args:
      model: an NNX module.
      path: the file, whose name ends in `.safetensors`.
      dtype: the dtype of the parameters in the file; statistics are at least float32. None: the model's dtypes.
      layout: "mpjax" for any model; "huggingface" or "timm" for models that these libraries have.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Returns:
      A `PretrainedReport` of the written variables, with the values that the cast to `dtype` lost.

    Raises:
      UsageError: the name of the file has another ending, the model does not have the layout, the layout has no key for
        a variable, or values overflow or flush to zero without `allow_lossy`.
    """
    file, model = pathlib.Path(path), one_by_one(model)
    if file.suffix != ".safetensors":
        raise UsageError(f"{file}: wanted a name that ends in .safetensors")
    known = layouts_of(model)
    if layout not in known:
        raise UsageError(f"no layout '{layout}' for {type(model).__name__}: wanted one of {', '.join(known)}")
    chosen = known[layout](model)
    variables = variables_of(model)
    if layout != "mpjax":  # other libraries have no histories of float8
        variables = {name: variable for name, variable in variables.items() if not is_history(name)}
    if homeless := sorted(variables.keys() - chosen.entries.keys()):
        raise UsageError(f"the {layout} layout has no key for {', '.join(homeless)}; write layout='mpjax'")

    if plain := sorted(path for path, _, _ in plain_arrays(model)):
        warnings.warn(
            f"{file} has no {', '.join(plain)}: plain arrays, which a model that loads the file makes anew. If "
            "they should be in it, keep them as nnx.Variable(array)",
            CheckpointWarning,
            stacklevel=2,
        )

    rows, arrays, lossy = [], {}, []
    for name, variable in variables.items():
        array = np.asarray(jax.device_get(variable.get_value()))
        target = array.dtype
        if dtype is not None and is_floating(array):
            requested = as_dtype(dtype)
            target = widest(requested, FLOAT32) if isinstance(variable, nnx.BatchStat) else requested
        key = chosen.entries[name].key
        lost = losses(array, target) if jnp.issubdtype(target, jnp.floating) else None
        counts = (lost.overflow, lost.flushed, lost.error) if lost else (0, 0, 0.0)
        if any(counts[:2]):
            lossy.append(
                f"{name}: of {array.size} values in {array.dtype}, {counts[0]} overflow and {counts[1]} flush "
                f"to zero in {target}"
            )
        rows.append(WeightRow(name, key, array.shape, array.dtype, target, *counts))
        arrays[name] = cast(array, target)
    if lossy and not allow_lossy:
        raise UsageError(
            refusal(
                "nothing was written",
                lossy,
                "write a wider dtype (on the command line --dtype bfloat16 or float32); in Python "
                "allow_lossy=True accepts the loss instead",
            )
        )
    # Transformers refuses a file without `format`.
    write_tensors(file, _foreign(arrays, chosen), format="np" if layout == "mpjax" else "pt")
    return PretrainedReport(str(file), layout, tuple(rows))


def _foreign(arrays: Mapping[str, np.ndarray], layout: WeightMap) -> dict[str, np.ndarray]:
    """Converts arrays by our path to tensors by the file's key, in its axis order and shape.

    Fused tensors are joined, stacked ones are taken apart. Adds the layout's `filler`.
    """
    fused = collections.defaultdict(dict)
    whole = dict(layout.filler)
    for name, array in arrays.items():
        entry = layout.entries[name]
        file_array = entry.transform.write(array)
        if entry.part:
            fused[entry.key, entry.part.axis, entry.part.count][entry.part.index] = file_array
        elif entry.rows:
            whole |= {entry.key.replace(ROW, str(number)): row for number, row in enumerate(file_array)}
        else:
            whole[entry.key] = file_array
    for (key, axis, count), pieces in fused.items():
        whole[key] = np.concatenate([pieces[index] for index in range(count)], axis)
    # safetensors writes memory without regard to strides, so a transposed view has to be made contiguous.
    return {key: np.array(array, order="C", copy=None) for key, array in whole.items()}


def write_tensors(file: pathlib.Path, tensors: Mapping[str, np.ndarray], *, format: str) -> None:
    """Writes contiguous arrays to a safetensors file atomically; `format` says whose names they have ("pt", "np")."""
    # It is the only item: safetensors writes several items in any order, so equal models would yield different files.
    with replacing(file) as opened:
        save_file(dict(tensors), pathlib.Path(opened.name), metadata={"format": format})
