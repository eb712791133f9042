"""Loads a Whisper from a folder of Hugging Face files, and exports it to one that transformers loads."""

import os
from collections.abc import Sequence

from flax import nnx
from jax.typing import DTypeLike

from mpjax.config.paths import expanded
from mpjax.models.config_keys import CONFIG, read_object
from mpjax.models.pretrained.files import find_folder
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import (
    TOKENIZER_FILES,
    export_folder,
    load_folder,
    named_classes,
    require_settings,
)
from mpjax.models.whisper.config_json import read_settings
from mpjax.models.whisper.network import Whisper, WhisperClassifier
from mpjax.precision.policy import Policy


COPIED = (
    *TOKENIZER_FILES,
    "generation_config.json",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""The files of a folder, besides the settings and the weights of the network, that an exported folder has too."""


def load_whisper(
    path: str | os.PathLike, *, policy: str | Policy = "float32", scan_blocks: bool = False, skip: Sequence[str] = ()
) -> Whisper:
    """Builds the Whisper of a folder of Hugging Face files, with its weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      policy: the precision of the model, which is applied by `mpjax.apply_policy`; weights are stored in its dtypes.
      scan_blocks: whether the blocks of each stack are one loop over stacked arrays; see `mpjax.models.scan`.
      skip: patterns of paths that keep their initial values, as in `mpjax.load_pretrained`.

    Raises:
      UsageError: config.json has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)
    return load_folder(lambda: Whisper(settings, scan_blocks=scan_blocks, rngs=nnx.Rngs(0)), folder, policy, skip)


def export_whisper(
    model: Whisper | WhisperClassifier,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    classes: Sequence[str] = (),
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `from_pretrained` of the model's class in transformers loads.

    The folder has the weights in one file, the config.json of `source` with the dtype of these weights (the widest, if
    there are several), and the files of `source` in `COPIED`, such as the tokenizer.

    Args:
      model: the Whisper, or a classifier of sounds.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the model was built from.
      classes: the names of the classes; empty: those in the config.json of `source`, if as many.
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
    changes = {"architectures": ["WhisperForConditionalGeneration"]}
    if isinstance(model, WhisperClassifier):
        outputs = model.head.kernel[...].shape[-1]
        changes = {"architectures": ["WhisperForAudioClassification"]}
        changes |= named_classes(read_object(origin / CONFIG), outputs, classes)
    return export_folder(
        model, folder, origin=origin, copied=COPIED, changes=changes, dtype=dtype, allow_lossy=allow_lossy
    )
