"""Reads the settings of a decoder from a `config.json` of Hugging Face transformers, and refuses what it does not know.

A key is understood, or it is known to change no logit, or it is an error: a model that was built without it would
compute something else without a word. Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys, read_config
from mpjax.models.decoder.ropes import gemma3_ropes_in, rope_in
from mpjax.models.decoder.settings import DecoderSettings, ExpertSettings
from mpjax.models.layer_kinds import LayerKind
from mpjax.models.rope_keys import kinds_of_layers
from mpjax.models.rotary import Rope
from mpjax.strict_json import encode


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "tanh_gelu"}


def read_settings(folder: pathlib.Path) -> DecoderSettings:
    """Reads the settings of the decoder in a folder of Hugging Face files.

    Raises:
      UsageError: there is no config.json, it is damaged, or `settings_of` refuses it; the message names the file.
    """
    return read_config(folder, settings_of)


def advice_on_balance(folder: pathlib.Path) -> list[str]:
    """Says, in a list of at most one sentence, that a loss of the experts in a folder is added to that of tokens."""
    experts = read_settings(folder).experts
    if experts is None or not experts.balance:
        return []
    return [
        f"{folder} has experts: the losses of next tokens and of answers add {experts.balance:g} "
        "(router_aux_loss_coef) times their load-balancing loss, which is the metric router_loss; other losses do not"
    ]


def settings_of(config: Mapping[str, Any]) -> DecoderSettings:
    """Converts the content of a `config.json` to the settings of a decoder.

    Raises:
      UsageError: it is of no decoder that mpjax has; a key is missing, unknown, or has a value that the decoder cannot
        have. The message names the key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config)
    family = keys.one_of("model_type", FAMILIES)
    architecture, read = FAMILIES[family]
    if (named := config.get("architectures")) not in (None, [architecture]):
        raise UsageError(f"architectures is {encode(named)}: wanted [{encode(architecture)}] for {family}")
    settings = read(keys)
    keys.refuse_rest()
    return settings


def _sizes(
    keys: ConfigKeys,
    *,
    head_dim: int | None = None,
    key_heads: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    epsilon: float = 1e-6,
) -> dict[str, Any]:
    """Takes the keys of sizes, activation and epsilon, and returns them as arguments of `DecoderSettings` by name.

    The number of layers is not among them. It raises UsageError for a key that is missing or wrong, and for dropout of
    attention or a feed-forward layer in chunks, which mpjax does not have.

    Args:
      keys: the keys.
      head_dim: the default of `head_dim`; None: `hidden_size` divided by `num_attention_heads`.
      key_heads: the default of `num_key_value_heads`; None: as many as heads.
      activation: the key of the activation, and its default.
      epsilon: the default of `rms_norm_eps`.
    """
    width, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    features = keys.size("head_dim", head_dim)
    if features is None:
        if width % heads:
            raise UsageError(
                f"hidden_size is {width}: wanted a multiple of num_attention_heads, {heads}, or a head_dim"
            )
        features = width // heads
    keys.only("attention_dropout", 0.0, 0, None)
    keys.only("chunk_size_feed_forward", 0)
    return {
        "vocabulary": keys.size("vocab_size"),
        "length": keys.size("max_position_embeddings"),
        "width": width,
        "heads": heads,
        "key_heads": keys.size("num_key_value_heads", key_heads) or heads,
        "head_features": features,
        "hidden": keys.size("intermediate_size"),
        "activation": _ACTIVATIONS[keys.one_of(activation[0], _ACTIVATIONS, activation[1])],
        "epsilon": keys.number("rms_norm_eps", epsilon),
    }


def _llama(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys)
    keys.only("pretraining_tp", 1)
    keys.only("rope_interleaved", False)
    bias = keys.take("attention_bias", bool, False)
    return DecoderSettings(
        **sizes,
        layers=(LayerKind(rope=rope_in(keys, sizes["length"])),) * keys.size("num_hidden_layers"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.take("mlp_bias", bool, False),
        tied=keys.take("tie_word_embeddings", bool, False),
    )


def _mistral(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=8)
    kind = LayerKind(rope=rope_in(keys, sizes["length"]), window=keys.size("sliding_window", 4096, null=True))
    layers = (kind,) * keys.size("num_hidden_layers")
    return DecoderSettings(**sizes, layers=layers, tied=keys.take("tie_word_embeddings", bool, False))


def _qwen2(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=32)
    rope = rope_in(keys, sizes["length"])
    return DecoderSettings(
        **sizes,
        layers=_behind(keys, rope),
        qkv_bias=True,
        tied=keys.take("tie_word_embeddings", bool, False),
    )


def _qwen3(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=32, head_dim=128)
    rope = rope_in(keys, sizes["length"])
    bias = keys.take("attention_bias", bool, False)
    return DecoderSettings(
        **sizes,
        layers=_behind(keys, rope),
        norms_of_heads=True,
        qkv_bias=bias,
        out_bias=bias,
        tied=keys.take("tie_word_embeddings", bool, False),
    )


def _qwen3_moe(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=4)
    window = keys.size("sliding_window", 4096, null=True)
    window = window if keys.take("use_sliding_window", bool, False) else None
    keys.unused("max_window_layers", "layer_types")  # transformers gives all layers of this network the window
    kind = LayerKind(rope=rope_in(keys, sizes["length"]), window=window)
    layers = (kind,) * keys.size("num_hidden_layers")
    every, dense = keys.size("decoder_sparse_step", 1), keys.take("mlp_only_layers", list, None) or []
    if not all(type(number) is int and 0 <= number < len(layers) for number in dense):
        raise keys.refusal("mlp_only_layers", dense, f"wanted numbers of layers, from 0 to {len(layers) - 1}")
    sparse = tuple(number not in dense and (number + 1) % every == 0 for number in range(len(layers)))
    bias = keys.take("attention_bias", bool, False)
    hidden = keys.size("moe_intermediate_size", 768)
    return DecoderSettings(
        **sizes,
        layers=layers,
        norms_of_heads=True,
        qkv_bias=bias,
        out_bias=bias,
        tied=keys.take("tie_word_embeddings", bool, False),
        experts=_experts(keys, ("num_experts", "num_local_experts"), 128, 8, hidden, sparse),
    )


def _olmoe(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, epsilon=1e-5)
    kind = LayerKind(rope=rope_in(keys, sizes["length"]))
    count = keys.size("num_hidden_layers")
    keys.only("clip_qkv", None)
    bias = keys.take("attention_bias", bool, False)
    return DecoderSettings(
        **sizes,
        layers=(kind,) * count,
        norms_of_projections=True,
        qkv_bias=bias,
        out_bias=bias,
        tied=keys.take("tie_word_embeddings", bool, False),
        experts=_experts(
            keys, ("num_experts", "num_local_experts"), 64, 8, sizes["hidden"], (True,) * count, balance=0.01
        ),
    )


def _mixtral(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=8, epsilon=1e-5)
    window = keys.size("sliding_window", None, null=True)
    kind = LayerKind(rope=rope_in(keys, sizes["length"], theta=1_000_000.0), window=window)
    count = keys.size("num_hidden_layers")
    keys.only("router_jitter_noise", 0.0, 0)
    experts = _experts(
        keys, ("num_local_experts",), 8, 2, sizes["hidden"], (True,) * count, normalised=True, files="mixtral"
    )
    tied = keys.take("tie_word_embeddings", bool, False)
    return DecoderSettings(**sizes, layers=(kind,) * count, tied=tied, experts=experts)


def _experts(
    keys: ConfigKeys,
    names: tuple[str, ...],
    count: int,
    each: int,
    hidden: int,
    sparse: tuple[bool, ...],
    *,
    normalised: bool | None = None,
    balance: float = 0.001,
    files: Literal["mixtral", "qwen"] = "qwen",
) -> ExpertSettings | None:
    """Takes the keys of experts; None if no layer has any.

    Args:
      keys: the keys.
      names: the keys of the number of experts, of which a file has one.
      count: the default of the number of experts.
      each: the default of `num_experts_per_tok`.
      hidden: the hidden width of an expert.
      sparse: for each layer, whether it has experts.
      normalised: whether weights are divided by their sum; None: `norm_topk_prob` says it.
      balance: the default of `router_aux_loss_coef`.
      files: the names in files.
    """
    keys.take("output_router_logits", bool, False)  # what transformers returns beside the logits
    numbers = [number for name in names if (number := keys.size(name, None)) is not None]
    if len(set(numbers)) > 1:
        raise keys.refusal(names[0], numbers[0], f"{names[1]} is {numbers[1]}")
    settings = ExpertSettings(
        count=(numbers or [count])[0],
        each=keys.size("num_experts_per_tok", each),
        hidden=hidden,
        normalised=keys.take("norm_topk_prob", bool, False) if normalised is None else normalised,
        sparse=sparse,
        balance=keys.number("router_aux_loss_coef", balance),
        files=files,
    )
    return settings if any(sparse) else None


def _behind(keys: ConfigKeys, rope: Rope) -> tuple[LayerKind, ...]:
    """Reads the layers of Qwen: those from index `max_window_layers` on have a window, if `use_sliding_window` is true.

    `layer_types`, if it is there, decides instead which layers have one.
    """
    count = keys.size("num_hidden_layers")
    window = keys.size("sliding_window", 4096, null=True)
    window = window if keys.take("use_sliding_window", bool, False) else None
    first = keys.take("max_window_layers", int, 28)
    return kinds_of_layers(
        keys, [window is not None and number >= first for number in range(count)], window, rope, rope
    )


def _smollm3(keys: ConfigKeys) -> DecoderSettings:
    sizes = _sizes(keys, key_heads=4)
    rope = rope_in(keys, sizes["length"], theta=2_000_000.0)
    count, interval = keys.size("num_hidden_layers"), keys.size("no_rope_layer_interval", 4)
    usual = [int((number + 1) % interval != 0) for number in range(count)]
    has_rope = keys.take("no_rope_layers", list, None) or usual  # 1 for layers with position embeddings
    if len(has_rope) != count or not all(number in (0, 1) for number in has_rope):
        raise keys.refusal("no_rope_layers", has_rope, f"wanted 0 or 1 for each of {count} layers")
    window = keys.size("sliding_window", None, null=True)
    window = window if keys.take("use_sliding_window", bool, False) else None
    keys.only("pretraining_tp", 1, 2)  # how the weights were divided when they were trained
    windows = kinds_of_layers(keys, [window is not None and not on for on in has_rope], window, rope, rope)
    bias = keys.take("attention_bias", bool, False)
    return DecoderSettings(
        **sizes,
        layers=tuple(
            LayerKind(rope=kind.rope if on else None, window=kind.window)
            for kind, on in zip(windows, has_rope, strict=True)
        ),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.take("mlp_bias", bool, False),
        tied=keys.take("tie_word_embeddings", bool, True),
    )


def _gemma2(keys: ConfigKeys) -> DecoderSettings:
    sizes = _gemma_sizes(keys)
    rope = rope_in(keys, sizes["length"])
    count, window = keys.size("num_hidden_layers"), keys.size("sliding_window", 4096, null=True)
    keys.only("sliding_window_size", window)
    return DecoderSettings(
        **sizes,
        layers=kinds_of_layers(keys, [number % 2 == 0 for number in range(count)], window, rope, rope),
        score_cap=keys.take("attn_logit_softcapping", float, 50.0, null=True),
        logit_cap=keys.take("final_logit_softcapping", float, 30.0, null=True),
    )


def _gemma3(keys: ConfigKeys) -> DecoderSettings:
    sizes = _gemma_sizes(keys)
    rope, local = gemma3_ropes_in(keys, sizes["length"])
    count, window = keys.size("num_hidden_layers"), keys.size("sliding_window", 4096, null=True)
    pattern = keys.size("sliding_window_pattern", 6)
    keys.unused("_sliding_window_pattern")  # of files with `layer_types`; transformers reads it in no other
    keys.only("attn_logit_softcapping", None)  # transformers stores a number, and does not use it
    return DecoderSettings(
        **sizes,
        layers=kinds_of_layers(keys, [(number + 1) % pattern != 0 for number in range(count)], window, rope, local),
        norms_of_heads=True,
        logit_cap=keys.take("final_logit_softcapping", float, None, null=True),
    )


def _gemma_sizes(keys: ConfigKeys) -> dict[str, Any]:
    sizes = _sizes(keys, head_dim=256, key_heads=4, activation=("hidden_activation", "gelu_pytorch_tanh"))
    keys.only("hidden_act", "gelu_pytorch_tanh")
    keys.only("use_bidirectional_attention", False, None)
    bias = keys.take("attention_bias", bool, False)
    return {
        **sizes,
        "norm_offset": 1.0,
        "norms_after": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "embedding_scale": sizes["width"] ** 0.5,
        "score_scale": keys.take("query_pre_attn_scalar", float, 256) ** -0.5,
        "tied": keys.take("tie_word_embeddings", bool, True),
    }


FAMILIES: Mapping[str, tuple[str, Callable[[ConfigKeys], DecoderSettings]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
}
"""For each `model_type`: the class of transformers, and the function that reads its keys."""
