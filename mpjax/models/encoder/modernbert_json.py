"""Converts the keys of a `config.json` of ModernBERT to its settings. Defaults are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mpjax.models.config_keys import ConfigKeys
from mpjax.models.encoder.activation_names import ACTIVATIONS
from mpjax.models.encoder.modernbert_settings import ModernBERTSettings
from mpjax.models.layer_kinds import LayerKind
from mpjax.models.rope_keys import kinds_of_layers, rope_of
from mpjax.models.rotary import Rope


_GATES: Mapping[str, Literal["gelu", "tanh_gelu", "silu"]] = {
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "silu": "silu",
    "swish": "silu",
}

_POOLINGS: Mapping[str, Literal["cls", "mean"]] = {"cls": "cls", "mean": "mean"}

_UNUSED = (
    "cls_token_id",
    "deterministic_flash_attn",  # of a kernel that mpjax does not have
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_cutoff_factor",
    "label2id",
    "mask_token_id",
    "num_labels",
    "problem_type",
    "reference_compile",
    "repad_logits_with_grad",
    "sep_token_id",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "tie_word_embeddings",  # of the head of pre-training, as `decoder_bias`
)
"""Keys that change no output, beside those of every network: tokens, names of classes, and words of training."""


def modernbert_settings(keys: ConfigKeys) -> ModernBERTSettings:
    """Takes the keys of ModernBERT, all but `model_type` and those of every network, and returns its settings.

    Raises:
      UsageError: a key has a value that ModernBERT cannot have. The message names the key and the value.
    """
    length, epsilon = keys.size("max_position_embeddings", 8192), keys.take("norm_eps", float, 1e-5)
    if epsilon <= 0:
        raise keys.refusal("norm_eps", epsilon, "wanted a positive number")
    if (unread := keys.take("layer_norm_eps", float, epsilon)) != epsilon:  # many files have both
        raise keys.refusal("layer_norm_eps", unread, f"and norm_eps, which transformers reads, is {epsilon}")
    keys.only("position_embedding_type", "absolute", "sans_pos", None)  # without effect: there are none but the rotary
    keys.only("chunk_size_feed_forward", 0)
    keys.only("is_decoder", False)
    keys.only("is_encoder_decoder", False)
    keys.only("add_cross_attention", False)
    keys.take("decoder_bias", bool, True)
    keys.unused(*_UNUSED)
    return ModernBERTSettings(
        vocabulary=keys.size("vocab_size", 50368),
        length=length,
        width=keys.size("hidden_size", 768),
        heads=keys.size("num_attention_heads", 12),
        hidden=keys.size("intermediate_size", 1152),
        layers=_layers(keys, length),
        activation=_GATES[keys.one_of("hidden_activation", _GATES, "gelu")],
        epsilon=epsilon,
        norm_bias=keys.take("norm_bias", bool, False),
        attention_bias=keys.take("attention_bias", bool, False),
        mlp_bias=keys.take("mlp_bias", bool, False),
        embedding_dropout=keys.number("embedding_dropout", 0.0, below=1),
        attention_dropout=keys.number("attention_dropout", 0.0, below=1),
        mlp_dropout=keys.number("mlp_dropout", 0.0, below=1),
        classifier_pooling=_POOLINGS[keys.one_of("classifier_pooling", _POOLINGS, "cls")],
        classifier_activation=ACTIVATIONS[keys.one_of("classifier_activation", ACTIVATIONS, "gelu")],
        classifier_bias=keys.take("classifier_bias", bool, False),
        classifier_dropout=keys.number("classifier_dropout", 0.0, below=1),
    )


def _layers(keys: ConfigKeys, length: int) -> tuple[LayerKind, ...]:
    """Reads the kind of each layer, from `layer_types` or, in older files, from `global_attn_every_n_layers`.

    `local_attention` counts both sides: of 128, a position attends to 64 before it, itself, and 64 after it.
    """
    count = keys.size("num_hidden_layers", 22)
    every = keys.size("global_attn_every_n_layers", None)
    slides = [number % (every or 3) > 0 for number in range(count)]
    window = keys.size("local_attention", 128) // 2 + 1
    rope, local = _ropes(keys, length)
    layers = kinds_of_layers(keys, slides, window, rope, local)
    if every is not None and [kind.window is not None for kind in layers] != slides:
        raise keys.refusal("global_attn_every_n_layers", every, "and layer_types has another order")
    return layers


def _ropes(keys: ConfigKeys, length: int) -> tuple[Rope, Rope]:
    """Reads the position embeddings of layers without a window, and those of layers with one, in this order."""
    keys.only("rope_scaling", None)
    nested = ConfigKeys(keys.take("rope_parameters", dict, None) or {}, "rope_parameters.")
    rope = _rope(keys, nested, "full_attention", length, outside="global_rope_theta", usual=160_000.0)
    local = _rope(keys, nested, "sliding_attention", length, outside="local_rope_theta", usual=10_000.0)
    nested.refuse_rest()
    return rope, local


def _rope(keys: ConfigKeys, nested: ConfigKeys, kind: str, length: int, *, outside: str, usual: float) -> Rope:
    """Reads the position embeddings of one kind of layer, from `rope_parameters` or a key of older files, `outside`."""
    inner = nested.take(kind, dict, None) or {}
    outer = keys.take(outside, float, inner.get("rope_theta", usual))  # null is no number
    if isinstance(outer, int | float) and outer <= 0:
        raise keys.refusal(outside, outer, "wanted a positive number")
    return rope_of(ConfigKeys(inner, f"rope_parameters.{kind}."), length, outer=outer, usual=usual, outside=outside)
