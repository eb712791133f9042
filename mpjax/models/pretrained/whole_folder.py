"""Loads a model from a folder of Hugging Face files, and writes one that transformers loads."""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from mpjax.errors import UsageError
from mpjax.files import write_atomically
from mpjax.models.config_keys import CONFIG
from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.files import SINGLE
from mpjax.models.pretrained.load import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.precision.calls import name_scopes
from mpjax.precision.dtypes import widest
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy
from mpjax.strict_json import encode


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""The files of the tokenizers of decoders and encoders alike, of which a folder has some."""

Model = TypeVar("Model", bound=nnx.Module)


def load_folder(
    make: Callable[[], Model], folder: pathlib.Path, policy: str | Policy, skip: Sequence[str] = ()
) -> Model:
    """Builds the model that `make` returns, with the weights of a folder, under a policy.

    Initializers run only if variables that match a pattern of `skip` keep their initial values.
    """
    if skip:
        model = make()
    else:
        model = nnx.eval_shape(make)
        _begin_streams(model)
    load_pretrained(model, folder, policy=policy, skip=skip)
    name_scopes(model)
    apply_policy(model, policy)
    return model


def _begin_streams(model: nnx.Module) -> None:
    """Makes the random streams of dropout, which no file has, of an abstract model: of seed 0, each another one."""
    streams = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngState)]
    for number, stream in enumerate(streams):
        if isinstance(stream, nnx.RngKey):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), stream.get_value().size)
            stream.set_value(keys.reshape(stream.get_value().shape))
        else:
            stream.set_value(jnp.zeros(stream.get_value().shape, stream.get_value().dtype))


def require_settings(origin: pathlib.Path, of_origin: Any, of_model: Any) -> None:
    """Raises UsageError if the settings of a folder are not those of the model that it is to describe."""
    if of_origin != of_model:
        raise UsageError(
            f"{origin / CONFIG} has other settings than the model: name the folder that it was loaded from"
        )


def named_classes(config: Mapping[str, Any], outputs: int, classes: Sequence[str]) -> dict[str, Any]:
    """The keys of config.json that name the classes of `outputs` logits: those in `config` stay if they are as many.

    `classes` are the names; empty: those in `config`, or else `LABEL_0`, `LABEL_1`, ...
    """
    count = {"num_labels": outputs} if "num_labels" in config else {}
    if not classes and len(config.get("id2label", ())) == outputs:
        return count
    names = classes or [f"LABEL_{number}" for number in range(outputs)]
    return {
        **count,
        "id2label": {str(number): label for number, label in enumerate(names)},
        "label2id": {label: number for number, label in enumerate(names)},
    }


def export_folder(
    model: nnx.Module,
    folder: pathlib.Path,
    *,
    origin: pathlib.Path,
    copied: Iterable[str],
    changes: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
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
      config: what config.json of `origin` is replaced by, before `changes`; None: it is not.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Raises:
      UsageError: `folder` is a file or not empty, or values overflow or flush to zero without `allow_lossy`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: write another one")
    folder.mkdir(parents=True, exist_ok=True)
    report = export_safetensors(model, folder / SINGLE, dtype=dtype, layout="huggingface", allow_lossy=allow_lossy)
    before = json.loads((origin / CONFIG).read_text(encoding="utf-8")) if config is None else config
    written = {**before, **(changes or {})}
    written |= dict.fromkeys(_DTYPES & written.keys() or {"torch_dtype"}, str(widest(*(row.after for row in report))))
    write_atomically(folder / CONFIG, (encode(written, indent=2) + "\n").encode())
    for name in copied:
        if (origin / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(origin / name, folder / name)
    return report


_DTYPES = {"torch_dtype", "dtype"}
"""The keys of config.json for the dtype of the weights: that of transformers before 5, and that since."""
