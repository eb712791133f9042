"""Reads the settings of CLIP and SigLIP from a `config.json` of Hugging Face, and refuses what it does not know.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys, read_config
from mpjax.models.image_text.settings import ImageTextSettings, TextSettings
from mpjax.models.vision.tower_json import ACTIVATIONS, settings_in, vision_settings


FAMILIES: Mapping[str, str] = {"clip": "CLIP", "siglip": "Siglip"}
"""For each `model_type`: what the names of its classes in transformers begin with."""


def read_settings(folder: pathlib.Path) -> ImageTextSettings:
    """Reads the settings of the two towers in a folder of Hugging Face files.

    Raises:
      UsageError: config.json is absent or damaged, or has what mpjax does not know; the message names the file.
    """
    return read_config(folder, settings_of)


def settings_of(config: Any) -> ImageTextSettings:
    """Converts the content of a `config.json` to the settings of two towers.

    Raises:
      UsageError: it is of no such network that mpjax has; a key is missing, unknown, or has a value that the network
        cannot have. The message names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="image_text network")
    kind = keys.one_of("model_type", FAMILIES)
    keys.unused("text_config", "text_config_dict", "vision_config", "vision_config_dict", "initializer_factor")
    keys.unused("id2label", "label2id", "problem_type", "tie_word_embeddings")
    vision = settings_in(config, "vision_config", kind, _vision)
    text, projected = settings_in(config, "text_config", kind, _text)
    if kind == "clip":
        features, scale, bias = keys.size("projection_dim", 512), keys.number("logit_scale_init_value", 2.6592), None
    else:  # section 3.2 of the paper
        features, scale, bias = projected, math.log(10), -10.0
    keys.refuse_rest()
    return ImageTextSettings(vision=vision, text=text, features=features, scale=scale, bias=bias)


def advice_on_length(folder: pathlib.Path, length: int) -> list[str]:
    """Says, in a list of at most one sentence, that a SigLIP reads another position of texts than its weights do.

    `length` is the length of the texts of a run, in tokens with their padding.
    """
    settings = read_settings(folder)
    if settings.bias is None or length == settings.text.length:  # CLIP reads the token that ends a text
        return []
    return [
        f"SigLIP reads the last position of a text, padding or not, which is {settings.text.length} in {folder} and "
        f"{length} here: with its weights, write --data.length {settings.text.length}"
    ]


def _vision(keys: ConfigKeys, kind: Any) -> Any:
    keys.only("vision_use_head", True)
    return vision_settings(keys, kind)


def _text(keys: ConfigKeys, kind: str) -> tuple[TextSettings, int]:
    """Takes the keys of a tower for texts; the second result is the width of its vectors, of SigLIP."""
    is_clip = kind == "clip"
    keys.only("attention_dropout", 0.0, 0)
    keys.unused("eos_token_id", "projection_dim")
    width = keys.size("hidden_size", 512 if is_clip else 768)
    activation = keys.one_of("hidden_act", ACTIVATIONS, "quick_gelu" if is_clip else "gelu_pytorch_tanh")
    settings = TextSettings(
        vocabulary=keys.size("vocab_size", 49408 if is_clip else 32000),
        length=keys.size("max_position_embeddings", 77 if is_clip else 64),
        width=width,
        depth=keys.size("num_hidden_layers", 12),
        heads=keys.size("num_attention_heads", 8 if is_clip else 12),
        hidden=keys.size("intermediate_size", 2048 if is_clip else 3072),
        activation=ACTIVATIONS[activation],
        epsilon=keys.number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
    )
    return settings, width if is_clip else keys.size("projection_size", None) or width
