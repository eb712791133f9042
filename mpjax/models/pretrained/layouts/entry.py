"""What a layout of weights is: for each variable of a model, its key in a file and how its array is laid out there."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from flax import nnx

from mpjax.models.attention import Attention
from mpjax.models.pretrained.tensors import variables_of


Turn = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Transform:
    """One array, in the file's arrangement and in ours; moves numbers, never changes one.

    Attributes:
      name: as a table shows it.
      read: the file's array to ours.
      write: ours to the file's, the inverse of `read`.
    """

    name: str
    read: Turn
    write: Turn

    def then(self, second: "Transform") -> "Transform":
        """Reads by this transform, then by `second`; writes in the opposite order."""
        return Transform(
            f"{self.name}, {second.name}",
            lambda array: second.read(self.read(array)),
            lambda array: self.write(second.write(array)),
        )


def transposed(name: str, *axes: int) -> Transform:
    """Our axis `i` is the file's axis `axes[i]`."""
    back = tuple(axes.index(axis) for axis in range(len(axes)))
    return Transform(name, functools.partial(np.transpose, axes=axes), functools.partial(np.transpose, axes=back))


def reshaped(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Transform:
    """The same numbers in the same order: the file's shape `theirs`, our shape `ours`.

    The projection to 12 heads of 64 features: `LINEAR.then(reshaped((768, 768), (768, 12, 64)))`.
    """
    return Transform(
        f"{_shape(theirs)} to {_shape(ours)}",
        functools.partial(_reshape, wanted=theirs, into=ours),
        functools.partial(_reshape, wanted=ours, into=theirs),
    )


def _reshape(array: np.ndarray, *, wanted: tuple[int, ...], into: tuple[int, ...]) -> np.ndarray:
    # An array of another shape but as many numbers would be reshaped in silence.
    if array.shape != wanted:
        raise ValueError(f"shape {array.shape} where {wanted} is wanted")
    return array.reshape(into)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


SAME = Transform("as it is", lambda array: array, lambda array: array)
LINEAR = transposed("transposed", 1, 0)  # PyTorch's nn.Linear: [out, in]; ours [in, out]
CONV = transposed("OIHW to HWIO", 2, 3, 1, 0)  # PyTorch's nn.Conv2d, grouped ones too


class Part(NamedTuple):
    """One of `count` equal parts of a fused array, as query, key and value are often stored.

    Attributes:
      index: which part, from 0.
      count: how many there are.
      axis: along which axis of the file's array.
    """

    index: int
    count: int
    axis: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one variable of the model is in a file.

    Attributes:
      key: the tensor's name in the file.
      transform: between the file's arrangement (of the part, where there is one) and ours.
      part: the part of the file's tensor that this variable is; None: all of it.
    """

    key: str
    transform: Transform = SAME
    part: Part | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the files of one library hold one model.

    Attributes:
      name: "huggingface", "timm", "mpjax".
      entries: our path (attribute names and indices joined by `/`) to its entry, for every parameter and statistic.
      base: what the library puts before the keys of all but the head, as in `bert.encoder…`; files of the model without
        a head lack it, and are read all the same. Entries have it.
      ignored: patterns (`*` for anything) of keys, without `base`, that carry nothing the model has.
      tied: keys without `base` that repeat another key's tensor; must be equal to it where present.
      renamed: (old, new) pieces of keys, for names that the library itself has changed.
      filler: tensors that carry nothing, but that the library wants to find in an exported file.
    """

    name: str
    entries: Mapping[str, Entry]
    base: str = ""
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    filler: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_KERNELS = {2: LINEAR, 4: CONV}


def layer_entries(model: nnx.Module, names: Mapping[str, str]) -> dict[str, Entry]:
    """The entries of linear layers, 2-D convolutions, embeddings and norms.

    Args:
      model: what holds the layers; may be abstract.
      names: module path of a layer to its name in the file: `{"stem/conv": "conv1"}`.

    Returns:
      Our path to entry, for all variables of these layers: `{"stem/conv/kernel": Entry("conv1.weight", CONV)}`.
    """
    entries = {}
    for path, variable in variables_of(model).items():
        module, _, leaf = path.rpartition("/")
        if module in names:
            transform = _KERNELS[len(variable.get_value().shape)] if leaf == "kernel" else SAME
            entries[path] = Entry(f"{names[module]}.{_NAMES[leaf]}", transform)
    return entries


def attention_entries(attention: Attention, path: str, query: str, key: str, value: str, out: str) -> dict[str, Entry]:
    """The entries of an attention whose projections are four of PyTorch's linear layers.

    Args:
      attention: ours; may be abstract.
      path: where it is in the model.
      query: the name of the layer in the file; so are `key`, `value` and `out`.
    """
    width, heads, features = attention.query.kernel.get_value().shape
    matrix = width, heads * features
    entries = {
        f"{path}/out/kernel": Entry(f"{out}.weight", LINEAR.then(reshaped(matrix[::-1], (heads, features, width)))),
        f"{path}/out/bias": Entry(f"{out}.bias"),
    }
    for ours, theirs in (("query", query), ("key", key), ("value", value)):
        kernel = LINEAR.then(reshaped(matrix, (width, heads, features)))
        entries[f"{path}/{ours}/kernel"] = Entry(f"{theirs}.weight", kernel)
        entries[f"{path}/{ours}/bias"] = Entry(f"{theirs}.bias", reshaped(matrix[1:], (heads, features)))
    return entries


def own_layout(model: nnx.Module) -> Layout:
    """Every variable under its own path, `blocks.0.conv1.kernel`; a file may have `/` in place of the dots."""
    entries = {path: Entry(path.replace("/", ".")) for path in variables_of(model)}
    return Layout("mpjax", entries, renamed=(("/", "."),))
