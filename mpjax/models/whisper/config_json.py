"""Converts the keys of a `config.json` of Whisper to its settings, and refuses what it does not know.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys, read_config
from mpjax.models.whisper.settings import WhisperSettings
from mpjax.strict_json import encode


FAMILIES: Mapping[str, tuple[str, ...]] = {
    "whisper": ("WhisperForConditionalGeneration", "WhisperForAudioClassification"),
}
"""For each `model_type`, the classes in transformers that have the weights of a whole network."""

_UNUSED = (
    "begin_suppress_tokens",  # of generation, which generation_config.json describes
    "forced_decoder_ids",
    "id2label",
    "init_std",
    "label2id",
    "max_length",
    "median_filter_width",  # of timestamps
    "num_labels",
    "problem_type",
    "suppress_tokens",
)
"""Keys that change no logit, beside those of every network."""

_OF_MASKS = (
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
)
"""Keys of SpecAugment, which `apply_spec_augment` false leaves unread."""

_ONLY_ZERO = ("activation_dropout", "attention_dropout", "decoder_layerdrop", "encoder_layerdrop")


def read_settings(folder: pathlib.Path) -> WhisperSettings:
    """Reads the settings of the Whisper in a folder of Hugging Face files.

    Raises:
      UsageError: the file is absent or damaged, or has what mpjax does not know; the message names the file.
    """
    return read_config(folder, settings_of)


def settings_of(config: Any) -> WhisperSettings:
    """Converts the content of a `config.json` to the settings of a Whisper.

    Raises:
      UsageError: it is of no Whisper; a key is missing, unknown, or has a value that a Whisper cannot have. The message
        names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="Whisper")
    kind = keys.one_of("model_type", FAMILIES)
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and len(named) == 1 and named[0] in FAMILIES[kind]):
        raise UsageError(f"architectures is {encode(named)}: wanted {' or '.join(FAMILIES[kind])}")
    keys.only("activation_function", "gelu")
    keys.only("is_encoder_decoder", True)
    keys.only("apply_spec_augment", False)
    keys.only("scale_embedding", False)
    keys.only("tie_word_embeddings", True)
    keys.only("use_weighted_layer_sum", False)
    for name in _ONLY_ZERO:
        keys.only(name, 0.0, 0)
    keys.unused(*_UNUSED, *_OF_MASKS)
    depth = keys.size("encoder_layers", 4)
    # transformers writes a second name of the number of layers.
    if (again := keys.size("num_hidden_layers", depth, null=True)) not in (None, depth):
        raise keys.refusal("num_hidden_layers", again, f"encoder_layers is {depth}; wanted the same number")
    settings = WhisperSettings(
        vocabulary=keys.size("vocab_size", 51865),
        bins=keys.size("num_mel_bins", 80),
        width=keys.size("d_model", 384),
        encoder_depth=depth,
        encoder_heads=keys.size("encoder_attention_heads", 6),
        encoder_hidden=keys.size("encoder_ffn_dim", 1536),
        decoder_depth=keys.size("decoder_layers", 4),
        decoder_heads=keys.size("decoder_attention_heads", 6),
        decoder_hidden=keys.size("decoder_ffn_dim", 1536),
        positions=keys.size("max_source_positions", 1500),
        length=keys.size("max_target_positions", 448),
        dropout=keys.number("dropout", 0.0, below=1),
        start=keys.take("decoder_start_token_id", int, 50257),
        projected=keys.size("classifier_proj_size", 256),
    )
    keys.refuse_rest()
    _check(keys, settings)
    return settings


def _check(keys: ConfigKeys, settings: WhisperSettings) -> None:
    for name, heads in (("encoder", settings.encoder_heads), ("decoder", settings.decoder_heads)):
        if settings.width % heads:
            raise keys.refusal(f"{name}_attention_heads", heads, f"wanted a divisor of d_model {settings.width}")
    if settings.width % 2:
        raise keys.refusal("d_model", settings.width, "wanted an even number, for sines and cosines of positions")
    if type(settings.start) is not int or not 0 <= settings.start < settings.vocabulary:
        raise keys.refusal("decoder_start_token_id", settings.start, f"wanted a token below {settings.vocabulary}")
