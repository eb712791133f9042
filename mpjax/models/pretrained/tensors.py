"""Opens safetensors files: lists names, shapes and dtypes at once and reads values one tensor at a time."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from mpjax.errors import UsageError


if TYPE_CHECKING:
    from flax import nnx


FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The floating dtypes that can be read. Narrower dtypes belong to quantised models, with scales stored elsewhere."""

DTYPES = FLOATING | {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}

_LFS = b"version https://git-lfs"


class Tensor(NamedTuple):
    """A tensor in a file whose values have not been read.

    Attributes:
      file: the open safetensors file.
      key: the tensor's name in the file.
      shape: the tensor's shape.
      dtype: the tensor's dtype, such as "float32"; as the format spells it ("F8_E4M3") if it is not in `DTYPES`.
    """

    file: "safe_open"
    key: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Reads the values.

        Raises:
          UsageError: the shape is impossible for an array, such as (0, 2**62).
        """
        try:
            return self.file.get_tensor(self.key)
        except ValueError as error:
            raise UsageError(
                f"{self.key} of shape {self.shape} cannot be read ({error}); fetch its file again"
            ) from error


@contextlib.contextmanager
def open_tensors(files: Sequence[pathlib.Path]) -> Iterator[Mapping[str, Tensor]]:
    """Context that yields the tensors of the files by name. They can be read only inside the `with` block.

    The files are memory-mapped, and `Tensor.read` reads the values of one tensor.

    Raises:
      UsageError: a file is not a safetensors file, or two files have a tensor of the same name.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, Tensor] = {}
        for path in files:
            try:
                # NumPy knows bfloat16 only after ml_dtypes is imported. JAX imports it.
                file = stack.enter_context(safe_open(path, framework="np"))
            except SafetensorError as error:
                raise UsageError(_why_not(path, error)) from error
            for key in file.keys():  # noqa: SIM118 (no mapping)
                if key in tensors:
                    raise UsageError(f"{key} is in two files of {path.parent}: delete the stale file")
                about = file.get_slice(key)
                dtype = str(about.get_dtype())
                tensors[key] = Tensor(file, key, tuple(about.get_shape()), DTYPES.get(dtype, dtype))
        yield tensors


def _why_not(path: pathlib.Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return f"{path} is a pointer of Git LFS, not the weights: write `git lfs pull` in its repository"
    return f"{path} is not a safetensors file or is damaged ({error}); fetch it again"


def variables_of(model: "nnx.Module") -> "dict[str, nnx.Variable]":
    """The parameters, statistics and other persistent arrays by path (attribute names and indices joined by `/`).

    Random streams, caches and intermediate values are left out. The variables are not copies: setting one changes the
    model.
    """
    from flax import nnx

    passing = (nnx.RngState, nnx.Cache, nnx.Intermediate)
    variables = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and not isinstance(node, passing) and hasattr(node.get_value(), "dtype"):
            variables["/".join(map(str, path))] = node
    return variables
