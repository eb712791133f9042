"""Reads the files of sentence-transformers: how a text becomes one vector, and how long it may be.

A module or a key is understood, or known to change no vector, or it is an error.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG, ConfigKeys, read_object
from mpjax.models.encoder.settings import Pooling, Sentence
from mpjax.strict_json import encode


MODULES = "modules.json"
TRANSFORMER = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The names of the file of the module Transformer, whatever the network: the first one that is there is read."""

WHOLE = "config_sentence_transformers.json"

_TOKENIZER = "tokenizer_config.json"

_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}

_POOLINGS: Mapping[str, Pooling | None] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": None,
    "lasttoken": None,
}
"""For each `pooling_mode_...` of a file, the pooling; None for those that mpjax does not have."""


def read_sentence(folder: pathlib.Path, width: int, longest: int) -> tuple[Sentence, int]:
    """Reads how a text becomes one vector, and the largest number of its tokens.

    Args:
      folder: a folder with a modules.json.
      width: the number of features of the encoder.
      longest: the largest number of tokens that the encoder takes.

    Raises:
      UsageError: a file is absent or damaged, or has a module, a pooling or a key that mpjax does not have.
    """
    modules = [_module(entry, folder / MODULES) for entry in _list(folder / MODULES)]
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UsageError(
            f"{folder / MODULES} has the modules {', '.join(kinds) or 'none'}: wanted Transformer, Pooling and perhaps "
            "Normalize; a vector without the others would be another one"
        )
    if modules[0][1]:
        raise UsageError(
            f"{folder / MODULES}: the path of Transformer is {modules[0][1]!r}: wanted the folder itself; move the "
            f'files of {modules[0][1]} to {folder}, and write "path": "" in {MODULES}'
        )
    pooling = _pooling(folder / modules[1][1] / CONFIG, width)
    normalized = "Normalize" in kinds
    _check_whole(folder / WHOLE, normalized=normalized)
    return Sentence(pooling=pooling, normalized=normalized), _length(folder, longest)


def folders_of_modules(folder: pathlib.Path) -> list[str]:
    """The folders of the modules in a folder of sentence-transformers, but that of the encoder; [] without modules."""
    file = folder / MODULES
    return [path for _, path in (_module(entry, file) for entry in _list(file)) if path] if file.is_file() else []


def _list(file: pathlib.Path) -> list[Any]:
    modules = read_object(file)
    if not isinstance(modules, list):
        raise UsageError(f"{file}: wanted a list of modules, got {type(modules).__name__}")
    return modules


def _module(entry: Any, file: pathlib.Path) -> tuple[str, str]:
    """The class of a module without the names of its packages, and its folder."""
    kind, path = (entry.get(name) if isinstance(entry, Mapping) else None for name in ("type", "path"))
    if not isinstance(kind, str) or not isinstance(path, str) or not kind.startswith("sentence_transformers."):
        raise UsageError(f"{file}: {encode(entry)} is no module of sentence-transformers, which mpjax knows alone")
    return kind.rpartition(".")[2], path


def _keys(file: pathlib.Path) -> ConfigKeys:
    values = read_object(file)
    if not isinstance(values, Mapping):
        raise UsageError(f"{file}: wanted a JSON object, got {type(values).__name__}")
    return ConfigKeys(values, f"{file}: ", network="encoder", file=file)


def _pooling(file: pathlib.Path, width: int) -> Pooling:
    keys = _keys(file)
    names = {name.removesuffix("_tokens").removesuffix("_token"): name for name in _POOLINGS}
    new: str | None = keys.take("pooling_mode", str, None)
    features = [keys.take(name, int, width) for name in ("word_embedding_dimension", "embedding_dimension")]
    if not keys.take("include_prompt", bool, True):
        raise keys.refusal(
            "include_prompt", False, "mpjax pools all tokens of a text, a prompt's too; if texts have none, write true"
        )
    flags = [name for name in _POOLINGS if keys.take(f"pooling_mode_{name}", bool, False)]
    chosen = flags if new is None else [names.get(new) or new]
    if len(chosen) != 1 or _POOLINGS.get(chosen[0]) is None:
        known = ", ".join(name for name, pooling in _POOLINGS.items() if pooling)
        raise UsageError(f"{file}: the pooling is {' and '.join(chosen) or 'none'}: wanted one of {known}")
    if features != [width, width]:
        raise UsageError(f"{file}: the pooling is of {features[0]} features, and the encoder has {width}")
    keys.refuse_rest()
    pooling = _POOLINGS[chosen[0]]
    assert pooling is not None
    return pooling


def _length(folder: pathlib.Path, longest: int) -> int:
    """The largest number of tokens that the file of Transformer says, or else that of the tokenizer, or `longest`."""
    file = next((folder / name for name in TRANSFORMER if (folder / name).is_file()), None)
    if file is not None:
        keys = _keys(file)
        if (length := keys.size("max_seq_length", None)) is not None and length > longest:
            raise keys.refusal("max_seq_length", length, f"the encoder takes at most {longest} tokens")
        keys.only("do_lower_case", False)  # of texts before the tokenizer, which does it itself
        keys.only("transformer_task", "feature-extraction")
        keys.only("modality_config", _TEXT)
        keys.only("module_output_name", "token_embeddings")
        keys.only("processing_kwargs", {}, None)
        keys.refuse_rest()
        if length is not None:
            return length
    if (folder / _TOKENIZER).is_file():
        values = read_object(folder / _TOKENIZER)
        most = values.get("model_max_length") if isinstance(values, Mapping) else None
        if type(most) is int and most > 0:  # 10^30 in files without a limit
            return min(most, longest)
    return longest


def _check_whole(file: pathlib.Path, *, normalized: bool) -> None:
    """Refuses what the settings of a whole sentence encoder say beside versions: a prompt before every text."""
    if not file.is_file():
        return
    keys = _keys(file)
    keys.unused("__version__", "model_type")
    keys.take("prompts", dict, {})  # without a default, only those who name one get it
    keys.only("default_prompt_name", None)
    if (name := keys.take("similarity_fn_name", str, None)) not in (None, "cosine", *(["dot"] if normalized else [])):
        raise keys.refusal("similarity_fn_name", name, "mpjax compares vectors by cosine")
    keys.only("truncate_dim", None)
    keys.refuse_rest()
