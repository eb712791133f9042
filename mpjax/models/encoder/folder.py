"""Loads an encoder from a folder of Hugging Face files, and exports it to one that transformers loads."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import load_file

from mpjax.config.paths import expanded
from mpjax.models.attention import Implementation
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.encoder.config_json import FAMILIES, read_settings
from mpjax.models.encoder.kinds import AnyClassifier, AnyEncoder, make_encoder
from mpjax.models.encoder.sentence_files import MODULES, TRANSFORMER, WHOLE, folders_of_modules
from mpjax.models.pretrained.export import write_tensors
from mpjax.models.pretrained.files import SINGLE, find_files, find_folder, open_tensors
from mpjax.models.pretrained.load import cast
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import (
    TOKENIZER_FILES,
    export_folder,
    load_folder,
    named_classes,
    require_settings,
)
from mpjax.precision.dtypes import widest
from mpjax.precision.policy import Policy


COPIED = (*TOKENIZER_FILES, "sentencepiece.bpe.model", "vocab.txt")
"""The files of a folder, besides the settings and the weights of the network, that an exported folder has too."""

_OF_SENTENCES = (MODULES, *TRANSFORMER, WHOLE)
"""Those of a folder of sentence-transformers, which a classifier is not."""

_POOLER = "pooler.dense."
"""Tensors that no vector depends on, and that transformers would make at random without them."""


def load_encoder(
    path: str | os.PathLike,
    *,
    policy: str | Policy = "float32",
    implementation: Implementation = "auto",
    scan_blocks: bool = False,
    skip: Sequence[str] = (),
) -> AnyEncoder:
    """Builds the encoder of a folder of Hugging Face files, with its weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      policy: the precision of the model, which is applied by `mpjax.apply_policy`; weights are stored in its dtypes.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.
      skip: patterns of paths that keep their initial values, as in `mpjax.load_pretrained`.

    Raises:
      UsageError: a file has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)
    return load_folder(
        lambda: make_encoder(settings, implementation=implementation, scan_blocks=scan_blocks, rngs=nnx.Rngs(0)),
        folder,
        policy,
        skip,
    )


def export_encoder(
    model: AnyEncoder,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    classes: Sequence[str] = (),
    problem: str | None = None,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.AutoModel.from_pretrained`, or sentence-transformers, loads.

    A classifier is for `AutoModelForSequenceClassification`. The folder has the weights in one file, the config.json of
    `source` with the dtype of these weights and the class of the model, and the files of `source` in `COPIED`; for
    vectors of texts also those of sentence-transformers and of its modules. A pooler of `source`, which no vector
    depends on, is copied too.

    Args:
      model: the encoder.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the encoder was loaded from.
      classes: the name of each class of a classifier; empty: those in config.json of `source` if they are as many, else
        `LABEL_0`, `LABEL_1`, ...
      problem: the `problem_type` of transformers, of a classifier; None: that of `source`.
      dtype: the dtype of the weights in the file; None: the model's own.
      allow_lossy: whether values may overflow to inf or flush to zero in `dtype`.

    Returns:
      A `PretrainedReport` of the written variables.

    Raises:
      UsageError: `path` is a file or not empty, the settings of `source` are not those of the model, or values overflow
        or flush to zero without `allow_lossy`.
    """
    origin, folder = find_folder(source), expanded(path)
    require_settings(origin, read_settings(origin), model.settings)
    is_sentences = not isinstance(model, AnyClassifier)
    modules = folders_of_modules(origin) if is_sentences else []
    of_sentences = [*_OF_SENTENCES, *(f"{name}/{CONFIG}" for name in modules)] if is_sentences else []
    report = export_folder(
        model,
        folder,
        origin=origin,
        copied=[*COPIED, *of_sentences],
        changes=_changes(model, read_object(origin / CONFIG), classes, problem),
        dtype=dtype,
        allow_lossy=allow_lossy,
    )
    if is_sentences:
        _add_pooler(folder / SINGLE, origin, widest(*(row.after for row in report)))
        for name in modules:  # that of Normalize is empty
            (folder / name).mkdir(exist_ok=True)
    return report


def _changes(
    model: AnyEncoder, config: Mapping[str, Any], classes: Sequence[str], problem: str | None
) -> dict[str, Any]:
    """The keys of config.json that say which class the weights are for, and its classes."""
    name = FAMILIES[config["model_type"]]
    if not isinstance(model, AnyClassifier):
        return {"architectures": [f"{name}Model"]}
    named = named_classes(config, model.head.kernel[...].shape[1], classes)
    solves = {"problem_type": problem} if problem else {}
    return {"architectures": [f"{name}ForSequenceClassification"], **solves, **named}


def _add_pooler(file: pathlib.Path, origin: pathlib.Path, dtype: np.dtype) -> None:
    with open_tensors(find_files(origin)) as tensors:
        kept = {key[key.index(_POOLER) :]: tensor.read() for key, tensor in tensors.items() if _POOLER in key}
    if kept:
        arrays = load_file(file) | {key: np.array(cast(array, dtype), order="C") for key, array in kept.items()}
        write_tensors(file, arrays, format="pt")
