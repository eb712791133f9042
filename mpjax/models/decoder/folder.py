"""Loads a decoder from a folder of Hugging Face files, and exports it to one that transformers loads."""

import json
import os
import shutil

from flax import nnx
from jax.typing import DTypeLike

from mpjax.config.paths import expanded
from mpjax.errors import UsageError
from mpjax.files import write_atomically
from mpjax.models.attention import Implementation
from mpjax.models.decoder.config_json import CONFIG, read_settings
from mpjax.models.decoder.network import Decoder
from mpjax.models.pretrained.export import export_safetensors
from mpjax.models.pretrained.files import SINGLE, find_folder
from mpjax.models.pretrained.load import load_pretrained
from mpjax.models.pretrained.report import PretrainedReport
from mpjax.precision.calls import name_scopes
from mpjax.precision.dtypes import widest
from mpjax.precision.modules import apply_policy
from mpjax.precision.policy import Policy
from mpjax.strict_json import encode


COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""The files of a folder, besides the settings and the weights of the network, that an exported folder has too."""


def load_decoder(
    path: str | os.PathLike,
    *,
    policy: str | Policy = "float32",
    implementation: Implementation = "auto",
    scan_blocks: bool = False,
) -> Decoder:
    """Builds the decoder of a folder of Hugging Face files, with its weights, under a policy.

    Args:
      path: a folder with config.json and safetensors, or an id of the Hugging Face hub.
      policy: the precision of the model, as of `mpjax.apply_policy`.
      implementation: attention implementation; see `mpjax.models.attention.attend`.
      scan_blocks: whether the blocks are one loop over stacked arrays; see `mpjax.models.scan`.

    Raises:
      UsageError: config.json has what mpjax does not know, or the weights do not fit (`mpjax.load_pretrained`).
    """
    folder = find_folder(path)
    settings = read_settings(folder)
    model = nnx.eval_shape(
        lambda: Decoder(settings, implementation=implementation, scan_blocks=scan_blocks, rngs=nnx.Rngs(0))
    )
    load_pretrained(model, folder, policy=policy)
    name_scopes(model)
    apply_policy(model, policy)
    return model


def export_decoder(
    model: Decoder,
    path: str | os.PathLike,
    *,
    source: str | os.PathLike,
    dtype: DTypeLike | None = None,
    allow_lossy: bool = False,
) -> PretrainedReport:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    It has the weights in one file, the config.json of `source` with the dtype of these weights, and its tokenizer.

    Args:
      model: the decoder.
      path: the folder, which must be empty or absent.
      source: the folder, or the id on the hub, that the decoder was loaded from.
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
        raise UsageError(
            f"{origin / CONFIG} has other settings than the model: name the folder that it was loaded from"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: write another one")
    folder.mkdir(parents=True, exist_ok=True)
    report = export_safetensors(model, folder / SINGLE, dtype=dtype, layout="huggingface", allow_lossy=allow_lossy)
    config = json.loads((origin / CONFIG).read_text(encoding="utf-8"))
    config |= dict.fromkeys(_DTYPES & config.keys() or {"torch_dtype"}, str(widest(*(row.after for row in report))))
    write_atomically(folder / CONFIG, (encode(config, indent=2) + "\n").encode())
    for name in COPIED:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
    return report


_DTYPES = {"torch_dtype", "dtype"}
"""The keys of config.json for the dtype of the weights: that of transformers before 5, and that since."""
