"""Loads a T5 from a folder of Hugging Face files, and exports it to one that transformers loads."""

import os
from collections.abc import Sequence

from flax import nnx
from jax.typing import DTypeLike

from mpjax.config.paths import expanded
from mpjax.models.pretrained.files import find_folder
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.models.pretrained.whole_folder import TOKENIZER_FILES, export_folder, load_folder, require_settings
from mpjax.models.t5.config_json import read_settings
from mpjax.models.t5.network import T5
from mpjax.precision.policy import Policy


COPIED = (*TOKENIZER_FILES, "spiece.model", "generation_config.json")
"""The files of a folder, besides the settings and the weights of the network, that an exported folder has too."""


def load_t5(
    path: str | os.PathLike, *, policy: str | Policy = "float32", scan_blocks: bool = False, skip: Sequence[str] = ()
) -> T5:
    """Builds the T5 of a folder of Hugging Face files, with its weights, under a policy.

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
    return load_folder(lambda: T5(settings, scan_blocks=scan_blocks, rngs=nnx.Rngs(0)), folder, policy, skip)


def export_t5(
    model: T5,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.AutoModelForSeq2SeqLM.from_pretrained` loads.

    The folder has the weights in one file, the config.json of `source` with the dtype of these weights (the widest, if
    there are several), and the files of `source` in `COPIED`, such as the tokenizer.

    Args:
      model: the T5.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the T5 was loaded from.
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
    return export_folder(model, folder, origin=origin, copied=COPIED, dtype=dtype, allow_lossy=allow_lossy)
