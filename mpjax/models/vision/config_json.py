"""Reads the settings of a network for images from a `config.json` of Hugging Face, and refuses what it does not know.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys, read_config
from mpjax.models.vision.settings import ConvNeXtV2Settings, Settings, SwinSettings, ViTSettings
from mpjax.models.vision.tower_json import tower_of
from mpjax.strict_json import encode


FAMILIES: Mapping[str, str] = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "convnextv2": "ConvNextV2",
    "swin": "Swin",
    "clip": "CLIP",
    "clip_vision_model": "CLIP",
    "siglip": "Siglip",
    "siglip_vision_model": "Siglip",
}
"""For each `model_type`: what the names of its classes in transformers begin with."""

WITH_TEACHER = "DeiTForImageClassificationWithTeacher"
"""The class of transformers with a head for the second token."""

MASK_TOKEN = "embeddings.mask_token"
"""The tensor of files, below the name of the family, that stands for hidden patches in pre-training."""

UNREAD: Mapping[str, tuple[str, ...]] = {"clip": ("post_layernorm.*",), "siglip": ("head.*",)}
"""The tensors of files that no logit of a classifier depends on, by the `kind` of a tower."""

_ACTIVATIONS: Mapping[str, Any] = {
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
}

_UNUSED = (
    "apply_layernorm",
    "encoder_stride",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "num_labels",
    "out_features",
    "out_indices",
    "pooler_act",
    "pooler_output_size",
    "problem_type",
    "reshape_hidden_states",
    "stage_names",
    "tie_word_embeddings",
    "use_mask_token",
)
"""Keys that change no logit: names of classes, and layers of pre-training, poolers and backbones without a head."""


def read_settings(folder: pathlib.Path) -> Settings:
    """Reads the settings of the network in a folder of Hugging Face files.

    Raises:
      UsageError: config.json is absent or damaged, or has what mpjax does not know; the message names the file.
    """
    return read_config(folder, settings_of)


def settings_of(config: Any) -> Settings:
    """Converts the content of a `config.json` to the settings of a network for images.

    Raises:
      UsageError: it is of no such network that mpjax has; a key is missing, unknown, or has a value that the network
        cannot have. The message names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="vision network")
    kind = keys.one_of("model_type", FAMILIES)
    named = config.get("architectures")
    if named is not None and not (
        isinstance(named, list) and len(named) == 1 and str(named[0]).startswith(FAMILIES[kind])
    ):
        raise UsageError(f"architectures is {encode(named)}: wanted one class of {FAMILIES[kind]}")
    keys.unused(*_UNUSED)
    match kind:
        case "convnextv2":
            settings = _convnext(keys)
        case "swin":
            settings = _swin(keys)
        case "dinov3_vit":
            settings = _dinov3(keys)
        case "clip" | "clip_vision_model" | "siglip" | "siglip_vision_model":
            settings = tower_of(keys, kind, config)
        case _:
            settings = _vit(keys, kind, second_head=named == [WITH_TEACHER])
    keys.refuse_rest()
    return settings


def class_of(model_type: str) -> str:
    """The name of the class of transformers that an exported classifier is for."""
    return FAMILIES[model_type] + ("Model" if model_type == "dinov3_vit" else "ForImageClassification")


def _vit(keys: ConfigKeys, kind: Any, *, second_head: bool) -> ViTSettings:
    """Takes the keys of the four kinds of ViT; `kind` is the `model_type`."""
    is_dino = kind.startswith("dinov2")
    width, dropout = keys.size("hidden_size", 768), keys.number("hidden_dropout_prob", 0.0, below=1)
    keys.only("attention_probs_dropout_prob", 0.0, 0)
    keys.only("qkv_bias", True)
    keys.only("chunk_size_feed_forward", 0)
    activation = _ACTIVATIONS[keys.one_of("hidden_act", _ACTIVATIONS, "gelu")]
    options: dict[str, Any] = {"block_dropout": dropout, "activation": activation}
    if is_dino:
        hidden, gated = int(width * keys.number("mlp_ratio", 4)), keys.take("use_swiglu_ffn", bool, False)
        options = {
            "gated": gated,
            "activation": "silu" if gated else activation,
            "hidden": (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden,
            "layer_scale": keys.number("layerscale_value", 1.0),
            "drop_path": keys.number("drop_path_rate", 0.0, below=1),
            "head_of_patches": True,
        }
    if kind == "dinov2_with_registers":
        options |= {"registers": keys.size("num_register_tokens", 4), "antialias": True}
    return ViTSettings(
        family=kind,
        image_size=keys.side("image_size", 224),
        patch=keys.side("patch_size", 14 if kind == "dinov2" else 16),
        channels=keys.size("num_channels", 3),
        width=width,
        depth=keys.size("num_hidden_layers", 12),
        heads=keys.size("num_attention_heads", 12),
        epsilon=keys.number("layer_norm_eps", 1e-6 if is_dino else 1e-12),
        dropout=dropout,
        distilled=kind == "deit",
        second_head=second_head,
        **({} if is_dino else {"hidden": keys.size("intermediate_size", 3072)}),
        **options,
    )


def _dinov3(keys: ConfigKeys) -> ViTSettings:
    keys.only("attention_dropout", 0.0, 0)
    for name, value in _BIASES.items():
        keys.only(name, value)
    keys.unused(*AUGMENTED)
    gated = keys.take("use_gated_mlp", bool, False)
    activations = _GATES if gated else {**_ACTIVATIONS, "silu": "silu"}
    theta = keys.number("rope_theta", 100.0)
    if theta <= 0:
        raise keys.refusal("rope_theta", theta, "wanted a positive number")
    return ViTSettings(
        family="dinov3_vit",
        image_size=keys.side("image_size", 224),
        patch=keys.side("patch_size", 16),
        channels=keys.size("num_channels", 3),
        width=keys.size("hidden_size", 384),
        depth=keys.size("num_hidden_layers", 12),
        heads=keys.size("num_attention_heads", 6),
        hidden=keys.size("intermediate_size", 1536),
        gated=gated,
        activation=activations[keys.one_of("hidden_act", activations, "gelu")],
        epsilon=keys.number("layer_norm_eps", 1e-5),
        drop_path=keys.number("drop_path_rate", 0.0, below=1),
        layer_scale=keys.number("layerscale_value", 1.0),
        registers=keys.take("num_register_tokens", int, 0),
        rope=theta,
        unbiased=("key", *(name for name in ("query", "value") if not keys.take(f"{name}_bias", bool, True))),
    )


_BIASES = {"key_bias": False, "proj_bias": True, "mlp_bias": True}
_GATES: Mapping[str, Any] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "tanh_gelu"}

AUGMENTED = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Keys of the random changes of the coordinates of patches in the pre-training of DINOv3, which mpjax does not make."""


def _convnext(keys: ConfigKeys) -> ConvNeXtV2Settings:
    keys.only("hidden_act", "gelu")
    keys.unused("image_size")  # it takes images of any size
    depths = tuple(keys.take("depths", list, [3, 3, 9, 3]))
    widths = keys.take("hidden_sizes", list, [96, 192, 384, 768])
    stages = keys.size("num_stages", 4)
    if not all(type(size) is int and size >= 1 for size in (*depths, *widths)):
        raise UsageError(f"depths and hidden_sizes are {[*depths]} and {widths}: wanted whole numbers of at least 1")
    if not stages == len(depths) == len(widths) or widths != [widths[0] * 2**stage for stage in range(stages)]:
        raise UsageError(
            f"hidden_sizes is {widths} and depths {[*depths]}: wanted one of each for {stages} stages (num_stages), "
            "and each stage of twice the width"
        )
    return ConvNeXtV2Settings(
        channels=keys.size("num_channels", 3),
        patch=keys.side("patch_size", 4),
        width=widths[0],
        depths=depths,
        drop_path=keys.number("drop_path_rate", 0.0, below=1),
        epsilon=keys.number("layer_norm_eps", 1e-12),
    )


def _swin(keys: ConfigKeys) -> SwinSettings:
    keys.only("attention_probs_dropout_prob", 0.0, 0)
    keys.only("qkv_bias", True)
    keys.only("use_absolute_embeddings", False)
    keys.unused("image_size", "hidden_size", "num_layers")  # it takes images of any size; the others follow from these
    depths, heads = (keys.take(name, list, usual) for name, usual in _OF_STAGES.items())
    if not all(type(size) is int and size >= 1 for size in (*depths, *heads)) or len(depths) != len(heads):
        raise UsageError(
            f"depths is {depths} and num_heads {heads}: wanted as many whole numbers of at least 1 in both, one for "
            "each stage"
        )
    return SwinSettings(
        channels=keys.size("num_channels", 3),
        patch=keys.side("patch_size", 4),
        width=keys.size("embed_dim", 96),
        depths=tuple(depths),
        heads=tuple(heads),
        window=keys.size("window_size", 7),
        mlp_ratio=keys.number("mlp_ratio", 4.0),
        activation=_ACTIVATIONS[keys.one_of("hidden_act", _ACTIVATIONS, "gelu")],
        dropout=keys.number("hidden_dropout_prob", 0.0, below=1),
        drop_path=keys.number("drop_path_rate", 0.1, below=1),
        epsilon=keys.number("layer_norm_eps", 1e-5),
    )


_OF_STAGES = {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
