"""Loads an encoder from a folder of Hugging Face files, and exports it to one that transformers loads."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import load_file

from mpjax.config.paths import expanded
from mpjax.errors import UsageError
from mpjax.models.attention import Implementation
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.encoder.config_json import FAMILIES, read_settings
from mpjax.models.encoder.network import Encoder, EncoderClassifier
from mpjax.models.encoder.sentence_files import LENGTH, MODULES, WHOLE, folders_of_modules
from mpjax.models.pretrained.export import write_tensors
from mpjax.models.pretrained.files import SINGLE, find_files, find_folder, open_tensors
from mpjax.models.pretrained.load import cast, load_pretrained
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import export_folder
from mpjax.precision.calls import name_scopes
from mpjax.precision.dtypes import widest
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy


COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    MODULES,
    LENGTH,
    WHOLE,
)
"""The files of a folder, besides the settings and the weights of the network, that an exported folder has too."""

_POOLER = "pooler.dense."
"""Tensors that no vector depends on, and that transformers would make at random without them."""


def load_encoder(
    path: str | os.PathLike,
    *,
    policy: str | Policy = "float32",
    implementation: Implementation = "auto",
    scan_blocks: bool = False,
) -> Encoder:
    """Builds the encoder of a folder of Hugging Face files, with its weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      policy: the precision of the model, which is applied by `mpjax.apply_policy`; weights are stored in its dtypes.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Raises:
      UsageError: a file has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)
    model = nnx.eval_shape(
        lambda: Encoder(settings, implementation=implementation, scan_blocks=scan_blocks, rngs=nnx.Rngs(0))
    )
    _begin_streams(model)
    load_pretrained(model, folder, policy=policy)
    name_scopes(model)
    apply_policy(model, policy)
    return model


def export_encoder(
    model: Encoder,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.AutoModel.from_pretrained`, or sentence-transformers, loads.

    A classifier is for `AutoModelForSequenceClassification`. The folder has the weights in one file, the config.json of
    `source` with the dtype of these weights and the class of the model, and the files of `source` in `COPIED`, with
    those of the modules of sentence-transformers. A pooler of `source`, which no vector depends on, is copied too.

    Args:
      model: the encoder.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the encoder was loaded from.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Returns:
      A `PretrainedReport` of the written variables.

    Raises:
      UsageError: `path` is a file or not empty, the settings of `source` are not those of the model, or values overflow
        or flush to zero without `allow_lossy`.
    """
    origin, folder = find_folder(source), expanded(path)
    if read_settings(origin) != model.settings:
        raise UsageError(f"{origin} has other settings than the model: name the folder that it was loaded from")
    modules = [] if isinstance(model, EncoderClassifier) else folders_of_modules(origin)
    copied = [*COPIED, *(f"{name}/{CONFIG}" for name in modules)]
    if isinstance(model, EncoderClassifier):
        copied = [name for name in COPIED if name not in (MODULES, LENGTH, WHOLE)]
    report = export_folder(
        model,
        folder,
        origin=origin,
        copied=copied,
        changes=_changes(model, read_object(origin / CONFIG)),
        dtype=dtype,
        allow_lossy=allow_lossy,
    )
    if not isinstance(model, EncoderClassifier):
        _add_pooler(folder / SINGLE, origin, widest(*(row.after for row in report)))
        for name in modules:  # that of Normalize is empty
            (folder / name).mkdir(exist_ok=True)
    return report


def _begin_streams(model: nnx.Module) -> None:
    """Makes the random streams of dropout, which no file has, of an abstract model: of seed 0, each another one."""
    streams = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.RngState)]
    for number, stream in enumerate(streams):
        if isinstance(stream, nnx.RngKey):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), stream.get_value().size)
            stream.set_value(keys.reshape(stream.get_value().shape))
        else:
            stream.set_value(jnp.zeros(stream.get_value().shape, stream.get_value().dtype))


def _changes(model: Encoder, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say which class the weights are for, and its classes."""
    name = FAMILIES[config["model_type"]]
    if not isinstance(model, EncoderClassifier):
        return {"architectures": [f"{name}Model"]}
    changes: dict[str, Any] = {"architectures": [f"{name}ForSequenceClassification"]}
    classes = model.head.kernel[...].shape[1]
    if len(config.get("id2label", ())) != classes:
        names = [f"LABEL_{number}" for number in range(classes)]
        changes["id2label"] = {str(number): label for number, label in enumerate(names)}
        changes["label2id"] = {label: number for number, label in enumerate(names)}
    return changes


def _add_pooler(file: pathlib.Path, origin: pathlib.Path, dtype: np.dtype) -> None:
    with open_tensors(find_files(origin)) as tensors:
        kept = {key[key.index(_POOLER) :]: tensor.read() for key, tensor in tensors.items() if _POOLER in key}
    if kept:
        arrays = load_file(file) | {key: np.array(cast(array, dtype), order="C") for key, array in kept.items()}
        write_tensors(file, arrays, format="pt")
