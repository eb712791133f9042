"""Reads the settings of CLIP's and SigLIP's towers for images from the keys of a `config.json`.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys
from mpjax.models.vision.settings import TowerSettings
from mpjax.strict_json import encode


ACTIVATIONS: Mapping[str, Any] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
}

UNUSED = (
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dropout",  # in old files of CLIP, which no class of transformers reads
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_word_embeddings",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
)
"""Keys of a tower's own object that change no output: old files have the defaults of all networks there."""


def tower_of(keys: ConfigKeys, kind: str, config: Mapping[str, Any]) -> TowerSettings:
    """Takes the keys of a tower for images: at the top, or in `vision_config` of files of two towers.

    The tower of texts, and what compares both, are not read.
    """
    keys.unused("initializer_factor")
    if kind.endswith("_vision_model"):
        return vision_settings(keys, kind.partition("_")[0])
    keys.unused("text_config", "text_config_dict", "vision_config", "vision_config_dict")
    keys.unused("projection_dim", "logit_scale_init_value")
    return settings_in(config, "vision_config", kind, vision_settings)


def settings_in(config: Mapping[str, Any], name: str, kind: str, read: Any) -> Any:
    """Reads the settings of the tower in the object `name` of config.json, by `read(keys, kind)`.

    Raises:
      UsageError: a key is not understood, or the object `name`_dict of old files says something else.
    """
    objects = {key: config[key] for key in (name, f"{name}_dict") if config.get(key) is not None} or {name: {}}
    settings = [_read(values, key, kind, read) for key, values in objects.items()]
    if settings[0] != settings[-1]:
        raise UsageError(f"{name} and {name}_dict describe two networks: remove one of them")
    return settings[0]


def _read(values: Any, name: str, kind: str, read: Any) -> Any:
    if not isinstance(values, Mapping):
        raise UsageError(f"{name} is {encode(values)}: wanted an object")
    keys = ConfigKeys(values, f"{name}.", network="tower")
    keys.unused(*UNUSED)
    settings = read(keys, kind)
    keys.refuse_rest()
    return settings


def vision_settings(keys: ConfigKeys, kind: Any) -> TowerSettings:
    """Takes the keys of a tower for images of "clip" or "siglip"."""
    is_clip = kind == "clip"
    keys.only("attention_dropout", 0.0, 0)
    keys.unused("vision_use_head", "projection_dim")
    activation = keys.one_of("hidden_act", ACTIVATIONS, "quick_gelu" if is_clip else "gelu_pytorch_tanh")
    return TowerSettings(
        kind=kind,
        image_size=keys.side("image_size", 224),
        patch=keys.side("patch_size", 32 if is_clip else 16),
        channels=keys.size("num_channels", 3),
        width=keys.size("hidden_size", 768),
        depth=keys.size("num_hidden_layers", 12),
        heads=keys.size("num_attention_heads", 12),
        hidden=keys.size("intermediate_size", 3072),
        activation=ACTIVATIONS[activation],
        epsilon=keys.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
    )
