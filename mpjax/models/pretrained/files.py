"""Finds safetensors files by a file, a folder or an id of the Hugging Face hub, and reads them one tensor at a time."""

import contextlib
import json
import os
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from mpjax.config.paths import expanded
from mpjax.config.program import command_line
from mpjax.errors import UsageError, reason_of
from mpjax.models.config_keys import CONFIG


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


class StackedTensor(NamedTuple):
    """Tensors of equal shapes and dtypes, stacked along a new first axis; otherwise like a `Tensor`."""

    rows: tuple[Tensor, ...]
    key: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Reads the values."""
        return np.stack([row.read() for row in self.rows])


@contextlib.contextmanager
def open_tensors(files: Sequence[pathlib.Path]) -> Iterator[Mapping[str, Tensor]]:
    """Context that yields the tensors of all files in one dict by name; read them only inside the `with` block.

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
    """Formats the message about a file that is not safetensors: a pointer of Git LFS, or another or damaged file."""
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return f"{path} is a pointer of Git LFS, not the weights: write `git lfs pull` in its repository"
    return f"{path} is not a safetensors file or is damaged ({error}); fetch it again"


def variables_of(model: "nnx.Module") -> "dict[str, nnx.Variable]":
    """Collects the variables with parameters, statistics and other persistent arrays of a model by path.

    A path is attribute names and indices joined by `/`. Plain arrays that are no `nnx.Variable`, random streams, caches
    and intermediate values are left out. The variables are not copies: setting one changes the model.
    """
    from flax import nnx

    passing = (nnx.RngState, nnx.Cache, nnx.Intermediate)
    variables = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and not isinstance(node, passing) and hasattr(node.get_value(), "dtype"):
            variables["/".join(map(str, path))] = node
    return variables


PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def find_files(path: str | os.PathLike) -> list[pathlib.Path]:
    """Finds the safetensors files that `path` refers to.

    Args:
      path: a `.safetensors` file; a folder with `model.safetensors`, with `model.safetensors.index.json` and the files
        that it names, or with one `.safetensors` file of another name; or an id of the Hugging Face hub, `owner/name`,
        whose files are downloaded unless they are in its cache.

    Raises:
      UsageError: `path` is a pickle, which can run any code when it is opened; it has no usable file; or the hub cannot
        be reached.
    """
    local = expanded(path)
    return [_safe(local)] if local.is_file() else _in_folder(find_folder(path))


def find_folder(path: str | os.PathLike) -> pathlib.Path:
    """Finds the folder at `path`; without one, takes `path` for an id of the Hugging Face hub, `owner/name`.

    Files of an id are downloaded, unless they are in the hub's cache, and the result is their folder in the cache.

    Raises:
      UsageError: `path` is a file, or is no folder and cannot be an id, or the hub cannot be reached.
    """
    local = expanded(path)
    if local.is_dir():
        return local
    if local.is_file():
        raise UsageError(f"{local} is a file: wanted the folder that it is in")
    text = str(path)
    like_a_file = text.endswith((".safetensors", *PICKLES)) or text.startswith((".", "~", "/"))
    in_a_folder = local.parent != pathlib.Path() and local.parent.is_dir()
    if like_a_file or in_a_folder or not _ID.fullmatch(text):
        raise UsageError(f"no file or folder {text} (looked for {local.absolute()})")
    return download(text)


def _safe(file: pathlib.Path) -> pathlib.Path:
    """Returns a `.safetensors` file; raises UsageError for another, and names the command that converts a pickle."""
    if file.suffix in PICKLES:
        raise UsageError(f"{file} is a pickle, which can run any code when it is opened; {_conversion(file)}")
    if file.suffix != ".safetensors":
        raise UsageError(f"{file} is not a .safetensors file, a folder with one, or an id of the hub")
    return file


def _conversion(pickle: pathlib.Path) -> str:
    """Formats the command that converts a PyTorch pickle to safetensors, with PyTorch's reader that runs no code."""
    # JSON strings are Python literals too, and their double quotes stay legible inside the shell's single quotes.
    file, into = json.dumps(str(pickle)), json.dumps(str(pickle.with_suffix(".safetensors")))
    code = (
        f"import torch, safetensors.torch as s; "
        f'w = torch.load({file}, map_location="cpu", weights_only=True); '
        f's.save_file({{k: v.clone().contiguous() for k, v in w.get("state_dict", w).items()}}, {into})'
    )
    return f"convert it once, where PyTorch is installed:\n  {shlex.join(['python', '-c', code])}"


def _in_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    """Finds the safetensors files of a folder as `find_files` describes; raises UsageError if there are none to use."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _parts(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise UsageError(f"several safetensors files in {folder}: name one of {', '.join(file.name for file in files)}")
    if pickles := sorted(file for file in folder.iterdir() if file.suffix in PICKLES):
        return [_safe(pickles[0])]
    if (folder / "config.toml").is_file() and (folder / "checkpoints").is_dir():
        raise UsageError(
            f"{folder} is a run of mpjax; write its weights to a file first:\n"
            f"  {command_line('export', '--run', str(folder), '--output', str(folder / SINGLE))}"
        )
    random = "; to train from random weights, write --model.pretrained none" if (folder / CONFIG).is_file() else ""
    raise UsageError(f"no safetensors in {folder}: wanted {SINGLE}, or {INDEX} with its parts{random}")


def _parts(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files that the folder's index names; raises UsageError if it is damaged or a file is missing."""
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        if strange := [
            name for name in names if not isinstance(name, str) or not name or pathlib.PurePath(name).name != name
        ]:
            raise ValueError(f"{strange[0]!r} is not a file name")
        if not names:
            raise ValueError("it names no files")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / INDEX} is damaged ({error!r}); fetch it again") from error
    if missing := [name for name in names if not os.path.isfile(folder / name)]:
        raise UsageError(f"{INDEX} names files that are missing from {folder}: {', '.join(missing)}")
    return [_safe(folder / name) for name in names]


PATTERNS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", CONFIG]


def download(name: str) -> pathlib.Path:
    """Downloads a hub model's files (`PATTERNS`), unless they are in the hub's cache, and returns their folder.

    Args:
      name: the id, `owner/name`, or only `name` for some old models.

    Raises:
      UsageError: huggingface_hub is not installed, the hub cannot be reached, or it has no such model.
    """
    prefix = f"there is no file or folder '{name}', so it was taken for an id of the Hugging Face hub"
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"{prefix}, for which huggingface_hub is needed: pip install huggingface_hub\n{_by_hand(name)}"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # also errors of its HTTP library, which differs by version
        raise UsageError(f"{prefix}, but the download failed: {reason_of(error)}\n{_by_hand(name)}") from error


def _by_hand(name: str) -> str:
    folder = name.rpartition("/")[2]
    return (
        "or fetch it by hand on a machine with network, and give the folder in place of the id:\n"
        f'  hf download {shlex.quote(name)} --include "*.safetensors" "*.json" --local-dir {shlex.quote(folder)}'
    )
