"""Reads the settings of an encoder from a folder of Hugging Face files, and refuses what it does not know.

Beside `config.json` these are the files of sentence-transformers, if the folder has a `modules.json`. Defaults of
missing keys are those of transformers.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG, ConfigKeys, read_object
from mpjax.models.encoder.activation_names import ACTIVATIONS
from mpjax.models.encoder.modernbert_json import modernbert_settings
from mpjax.models.encoder.modernbert_settings import ModernBERTSettings
from mpjax.models.encoder.sentence_files import MODULES, read_sentence
from mpjax.models.encoder.settings import EncoderSettings, Sentence
from mpjax.strict_json import encode


FAMILIES: Mapping[str, str] = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "modernbert": "ModernBert",
}
"""For each `model_type`: what the names of its classes in transformers begin with.

All but BERT and ModernBERT are RoBERTa's shape.
"""

Settings = EncoderSettings | ModernBERTSettings

_UNUSED = (
    "attention_probs_dropout_prob",  # see `advice_on_dropout`
    "directionality",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "num_labels",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "tie_word_embeddings",
)
"""Keys that change no output of an encoder, beside those of every network: names of classes, and words of training."""


def advice_on_dropout(folder: pathlib.Path) -> list[str]:
    """Advises, in a list of at most one sentence, that attention weights have no dropout."""
    config = read_object(folder / CONFIG)
    if config["model_type"] == "modernbert":
        rate = config.get("attention_dropout", 0.0)
        return [f"attention_dropout {rate} is of the outputs of attention; its weights have no dropout"] if rate else []
    rate = config.get("attention_probs_dropout_prob", 0.1)
    return [f"attention_probs_dropout_prob {rate} without effect: attention weights have no dropout"] if rate else []


def read_settings(folder: pathlib.Path) -> Settings:
    """Reads the settings of the encoder in a folder of Hugging Face files.

    Without a modules.json, a text is the mean of its tokens, and its vector is normalized.

    Raises:
      UsageError: a file is absent or damaged, or has what mpjax does not know; the message names the file.
    """
    try:
        settings = settings_of(read_object(folder / CONFIG))
    except UsageError as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from error
    if not (folder / MODULES).is_file():
        return settings
    sentence, length = read_sentence(folder, settings.width, settings.length)
    return dataclasses.replace(settings, sentence=sentence, length=length)


def settings_of(config: Any) -> Settings:
    """Converts the content of a `config.json` to the settings of an encoder.

    Raises:
      UsageError: it is of no encoder that mpjax has; a key is missing, unknown, or has a value that the encoder cannot
        have. The message names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="encoder")
    kind = keys.one_of("model_type", FAMILIES)
    named = config.get("architectures")
    if named is not None and not (
        isinstance(named, list) and len(named) == 1 and str(named[0]).startswith(FAMILIES[kind])
    ):
        raise UsageError(f"architectures is {encode(named)}: wanted one class of {FAMILIES[kind]}")
    settings = modernbert_settings(keys) if kind == "modernbert" else _bert(keys, kind)
    keys.refuse_rest()
    return settings


def _bert(keys: ConfigKeys, kind: str) -> EncoderSettings:
    """Takes the keys of BERT and RoBERTa; `kind` is the `model_type`."""
    width, heads = keys.size("hidden_size", 768), keys.size("num_attention_heads", 12)
    positions = keys.size("max_position_embeddings", 512)
    dropout = keys.number("hidden_dropout_prob", 0.1, below=1)
    head_dropout = keys.number("classifier_dropout", None, below=1)
    padding = None if kind == "bert" else keys.take("pad_token_id", int, 1)
    keys.only("position_embedding_type", "absolute")
    keys.only("is_decoder", False)
    keys.only("add_cross_attention", False)
    keys.only("chunk_size_feed_forward", 0)
    keys.unused(*_UNUSED)
    return EncoderSettings(
        family="bert" if kind == "bert" else "roberta",
        vocabulary=keys.size("vocab_size", 30522 if kind == "bert" else 50265),
        length=positions if padding is None else positions - padding - 1,
        positions=positions,
        width=width,
        depth=keys.size("num_hidden_layers", 12),
        heads=heads,
        hidden=keys.size("intermediate_size", 3072),
        segments=keys.size("type_vocab_size", 2),
        padding=padding,
        activation=ACTIVATIONS[keys.one_of("hidden_act", ACTIVATIONS, "gelu")],
        epsilon=keys.number("layer_norm_eps", 1e-12),
        dropout=dropout,
        head_dropout=dropout if head_dropout is None else head_dropout,
        sentence=Sentence(),
    )
