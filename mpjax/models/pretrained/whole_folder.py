"""Writes a folder that transformers loads: the weights, the settings and the other files of a model's folder."""

import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from mpjax.errors import UsageError
from mpjax.files import write_atomically
from mpjax.models.config_keys import CONFIG
from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.files import SINGLE
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.precision.dtypes import widest
from mpjax.strict_json import encode


def export_folder(
    model: nnx.Module,
    folder: pathlib.Path,
    *,
    origin: pathlib.Path,
    copied: Iterable[str],
    changes: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes the weights of a model in one file, its config.json, and copies of other files.

    Args:
      model: the model, with a layout of Hugging Face.
      folder: the folder, which must be empty or absent.
      origin: the folder that the model was loaded from.
      copied: the names of files of `origin` that the folder has too, if they are there.
      changes: keys of config.json with other values than in `origin`, beside the dtype of the weights.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Raises:
      UsageError: `folder` is a file or not empty, or values overflow or flush to zero without `allow_lossy`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: write another one")
    folder.mkdir(parents=True, exist_ok=True)
    report = export_safetensors(model, folder / SINGLE, dtype=dtype, layout="huggingface", allow_lossy=allow_lossy)
    config = json.loads((origin / CONFIG).read_text(encoding="utf-8")) | dict(changes or {})
    config |= dict.fromkeys(_DTYPES & config.keys() or {"torch_dtype"}, str(widest(*(row.after for row in report))))
    write_atomically(folder / CONFIG, (encode(config, indent=2) + "\n").encode())
    for name in copied:
        if (origin / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(origin / name, folder / name)
    return report


_DTYPES = {"torch_dtype", "dtype"}
"""The keys of config.json for the dtype of the weights: that of transformers before 5, and that since."""
