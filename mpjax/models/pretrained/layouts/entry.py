"""Defines a layout: the key of each variable of a model in a file, with its axis order and shape there."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from mpjax.models.pretrained.files import variables_of


Turn = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A pair of functions that convert an array between the file's axis order and shape and ours; values do not change.

    Attributes:
      name: a short description.
      read: converts the file's array to ours.
      write: converts our array to the file's; the inverse of `read`.
    """

    name: str
    read: Turn
    write: Turn

    def then(self, second: "Transform") -> "Transform":
        """Composes two transforms: reads with this one first, then with `second`, and writes in the opposite order."""
        return Transform(
            f"{self.name}, {second.name}",
            lambda array: second.read(self.read(array)),
            lambda array: self.write(second.write(array)),
        )


def transposed(name: str, *axes: int) -> Transform:
    """Makes the transform that permutes axes: our axis `i` is the file's axis `axes[i]`. `name` describes it."""
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return Transform(name, functools.partial(np.transpose, axes=axes), functools.partial(np.transpose, axes=back))


def reshaped(file_shape: tuple[int, ...], model_shape: tuple[int, ...]) -> Transform:
    """Makes the transform that reshapes between the shapes `file_shape` and `model_shape`, in row-major order.

    Its functions raise ValueError for an array of another shape. The kernel of a projection to 12 heads of 64 features
    is read by `LINEAR.then(reshaped((768, 768), (768, 12, 64)))`.
    """
    return Transform(
        f"{_shape(file_shape)} to {_shape(model_shape)}",
        functools.partial(_reshape, wanted=file_shape, into=model_shape),
        functools.partial(_reshape, wanted=model_shape, into=file_shape),
    )


def _reshape(array: np.ndarray, *, wanted: tuple[int, ...], into: tuple[int, ...]) -> np.ndarray:
    # np.reshape would accept any array with the same number of values.
    if array.shape != wanted:
        raise ValueError(f"shape {array.shape} where {wanted} is wanted")
    return array.reshape(into)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


SAME = Transform("as it is", lambda array: array, lambda array: array)
LINEAR = transposed("transposed", 1, 0)  # PyTorch's nn.Linear: [out, in]; ours [in, out]
CONV1D = transposed("OIW to WIO", 2, 1, 0)  # PyTorch's nn.Conv1d
CONV = transposed("OIHW to HWIO", 2, 3, 1, 0)  # PyTorch's nn.Conv2d, also grouped


class FusedPart(NamedTuple):
    """One of `count` equal parts of an array that a file concatenates, such as query, key and value in one matrix.

    Attributes:
      index: the index of the part, from 0.
      count: the number of parts.
      axis: the axis of the file's array along which it is split.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    axis: int


ROW = "*"
"""What stands in the key of a `FileEntry` for the number of a row."""


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Where and how a file stores one variable of the model.

    Attributes:
      key: the tensor's name in the file.
      transform: the transform between the file's tensor (or its `part`) and our array.
      part: the part of the file's tensor that holds this variable; None for the whole tensor.
      rows: the number of the file's tensors that are stacked along a new first axis, such as the experts of a layer;
        the key has `ROW` where each has its number. None: one tensor.
    """

    key: str
    transform: Transform = SAME
    part: FusedPart | None = None
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """The keys and shapes of one model in the files of one library.

    Attributes:
      name: the name of the layout, such as "huggingface", "timm" or "mpjax".
      entries: the entry of every parameter and statistic, by our path (attribute names and indices joined by `/`).
      base: the prefix of all keys except the head's, such as `bert.` in `bert.encoder…`. The keys in `entries` have
        it. Files of a model without a head lack it and are read too.
      ignored: patterns (`*` for anything) of keys, without `base`, that the model does not use.
      tied: keys, without `base`, that repeat the tensor of another key. The two must be equal if both are present.
      renamed: (old, new) substrings of keys, for names that the library has changed.
      filler: tensors without information that the library expects in an exported file.
      in_memory: (old, new) substrings of the names of layers, which the library renames when it loads a file,
        in order.
      others: beginnings of names of the library's networks with the same keys and shapes that compute something else,
        and what they do.
    """

    name: str
    entries: Mapping[str, FileEntry]
    base: str = ""
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    filler: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    in_memory: tuple[tuple[str, str], ...] = ()
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)


_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_KERNELS = {2: LINEAR, 3: CONV1D, 4: CONV}


def layer_entries(model: nnx.Module, names: Mapping[str, str]) -> dict[str, FileEntry]:
    """Maps the variables of linear layers, convolutions, embeddings and norms to their entries in a PyTorch file.

    Variables of layers that `names` does not have are left out.

    Args:
      model: the model with the layers; may be abstract.
      names: the name of each layer in the file, by its path in the model: `{"stem/conv": "conv1"}`.

    Returns:
      The entries of the weights, biases and statistics of these layers, by our path, as in
      `{"stem/conv/kernel": FileEntry("conv1.weight", CONV)}`.
    """
    entries = {}
    for path, variable in variables_of(model).items():
        module, _, leaf = path.rpartition("/")
        if module in names and leaf in _NAMES:
            transform = _KERNELS[len(variable.get_value().shape)] if leaf == "kernel" else SAME
            entries[path] = FileEntry(f"{names[module]}.{_NAMES[leaf]}", transform)
    return entries


def layout_with_norms(
    name: str, model: nnx.Module, names: Mapping[str, str], base: str = "", renamed: tuple[tuple[str, str], ...] = ()
) -> WeightMap:
    """Builds a layout of PyTorch from `names`, as in `layer_entries`, for a model with batch norms."""
    entries = layer_entries(model, names)
    norms = [entry.key.removesuffix("running_mean") for entry in entries.values() if entry.key.endswith("running_mean")]
    # PyTorch counts the batches of each norm, but uses the count only if the norm has no momentum.
    counts = {f"{norm}num_batches_tracked": np.zeros((), np.int64) for norm in norms}
    return WeightMap(name, entries, base=base, ignored=("*.num_batches_tracked",), renamed=renamed, filler=counts)


def attention_entries(
    attention: nnx.Module, path: str, query: str, key: str, value: str, out: str
) -> dict[str, FileEntry]:
    """Maps the variables of an attention to their entries in a file with its projections as PyTorch linear layers.

    The keys of the result are our paths. Projections without a bias have no entry for it.

    Args:
      attention: our module, with an `nnx.LinearGeneral` each as `query`, `key`, `value` and `out`; may be abstract.
      path: the path of the module in the model.
      query: the name of the query projection in the file.
      key: the name of the key projection in the file.
      value: the name of the value projection in the file.
      out: the name of the output projection in the file.
    """
    entries = {}
    for projection, name in (("query", query), ("key", key), ("value", value), ("out", out)):
        layer: Any = getattr(attention, projection)
        shape = layer.kernel.get_value().shape
        # [width, heads, features], and [heads, features, width] of the last
        matrix = (shape[0] * shape[1], shape[2]) if projection == "out" else (shape[0], shape[1] * shape[2])
        entries[f"{path}/{projection}/kernel"] = FileEntry(f"{name}.weight", LINEAR.then(reshaped(matrix, shape)))
        if layer.bias is not None:
            bias = layer.bias.get_value().shape
            turn = SAME if projection == "out" else reshaped((matrix[1],), bias)
            entries[f"{path}/{projection}/bias"] = FileEntry(f"{name}.bias", turn)
    return entries


def own_layout(model: nnx.Module) -> WeightMap:
    """Builds mpjax's own layout, which any model has: each variable has its path as its key, `blocks.0.conv1.kernel`.

    In a file that is read, the keys may have `/` in place of the dots.
    """
    entries = {path: FileEntry(path.replace("/", ".")) for path in variables_of(model)}
    return WeightMap("mpjax", entries, renamed=(("/", "."),))
