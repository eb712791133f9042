"""Converts the keys of a `config.json` of T5 to its settings, and refuses what it does not know.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from mpjax.errors import UsageError
from mpjax.models.config_keys import CONFIG, ConfigKeys, read_object
from mpjax.models.pretrained.files import find_files, open_tensors
from mpjax.models.t5.settings import T5Settings
from mpjax.strict_json import encode


FAMILIES: Mapping[str, tuple[str, ...]] = {
    "t5": ("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    "mt5": ("MT5ForConditionalGeneration",),
}
"""For each `model_type`, the classes in transformers that have the weights of a whole network."""

_KINDS: Mapping[str, tuple[Literal["relu", "tanh_gelu", "silu"], bool]] = {
    "relu": ("relu", False),
    "gated-gelu": ("tanh_gelu", True),
    "gated-silu": ("silu", True),
}
"""For each `feed_forward_proj`, the activation, and whether the MLP is gated."""

_UNUSED = (
    "classifier_dropout",  # of another class
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_factor",
    "label2id",
    "n_positions",  # of no table: distances are
    "num_labels",
    "output_past",
    "problem_type",
    "task_specific_params",  # prefixes of texts, and sizes of searches
)
"""Keys that change no logit, beside those of every network."""


def read_settings(folder: pathlib.Path) -> T5Settings:
    """Reads the settings of the T5 in a folder of Hugging Face files.

    Raises:
      UsageError: a file is absent or damaged, or config.json has what mpjax does not know; the message names the file.
    """
    try:
        return settings_of(read_object(folder / CONFIG), has_head=_has_head(folder))
    except UsageError as error:
        raise UsageError(f"{folder / CONFIG}: {error}") from error


def advice_on_t5(folder: pathlib.Path) -> list[str]:
    """Advises, in a list of at most one sentence, that attention weights have no dropout."""
    rate = read_object(folder / CONFIG).get("dropout_rate", 0.1)
    return (
        [f"dropout_rate {rate} is of embeddings, layers and features; attention weights have no dropout"]
        if rate
        else []
    )


def settings_of(config: Any, *, has_head: bool = False) -> T5Settings:
    """Converts the content of a `config.json` to the settings of a T5.

    Args:
      config: the content.
      has_head: whether the file of the weights has logits of their own. transformers 5 writes `tie_word_embeddings`
        true whatever the network is, so of v1.1, FLAN-T5 and mT5 that it has written, the file says it.

    Raises:
      UsageError: it is of no T5; a key is missing, unknown, or has a value that a T5 cannot have. The message names the
        key and the value.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="T5")
    kind = keys.one_of("model_type", FAMILIES)
    named = config.get("architectures")
    if named is not None and not (isinstance(named, list) and len(named) == 1 and named[0] in FAMILIES[kind]):
        raise UsageError(f"architectures is {encode(named)}: wanted {FAMILIES[kind][0]}")
    usual = _USUAL[kind]
    activation, gated = _KINDS[keys.one_of("feed_forward_proj", _KINDS, usual["feed_forward_proj"])]
    keys.only("dense_act_fn", {"relu": "relu", "tanh_gelu": "gelu_new", "silu": "silu"}[activation])
    keys.only("is_gated_act", gated)
    keys.only("is_encoder_decoder", True)
    keys.only("is_decoder", False)
    keys.only("chunk_size_feed_forward", 0)
    keys.unused(*_UNUSED)
    tied = keys.take("tie_word_embeddings", bool, True)
    scaled = keys.take("scale_decoder_outputs", bool, tied) if kind == "t5" else False
    depth = keys.size("num_layers", usual["num_layers"])
    start, padding = keys.take("decoder_start_token_id", int, None), config.get("pad_token_id", 0)
    settings = T5Settings(
        vocabulary=keys.size("vocab_size", usual["vocab_size"]),
        width=keys.size("d_model", 512),
        heads=keys.size("num_heads", usual["num_heads"]),
        head_features=keys.size("d_kv", 64),
        hidden=keys.size("d_ff", usual["d_ff"]),
        encoder_depth=depth,
        decoder_depth=keys.size("num_decoder_layers", None) or depth,
        buckets=keys.size("relative_attention_num_buckets", 32),
        farthest=keys.size("relative_attention_max_distance", 128),
        activation=activation,
        gated=gated,
        epsilon=keys.number("layer_norm_epsilon", 1e-6),
        dropout=keys.number("dropout_rate", 0.1, below=1),
        tied=tied and not (has_head and not scaled),
        scaled=scaled,
        start=start if start is not None else padding if kind == "t5" else 0,  # mT5 has a default of its own
    )
    keys.refuse_rest()
    _check(keys, settings)
    return settings


_USUAL: Mapping[str, Mapping[str, Any]] = {
    "t5": {"feed_forward_proj": "relu", "vocab_size": 32128, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "mt5": {"feed_forward_proj": "gated-gelu", "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
}
"""The defaults of transformers that differ between families."""


def _check(keys: ConfigKeys, settings: T5Settings) -> None:
    if settings.buckets < 4 or settings.buckets % 4:
        raise keys.refusal("relative_attention_num_buckets", settings.buckets, "wanted 4, 8, 12, ...")
    if settings.farthest <= settings.buckets // 2:
        raise keys.refusal(
            "relative_attention_max_distance", settings.farthest, f"wanted more than {settings.buckets // 2}"
        )
    if type(settings.start) is not int or not 0 <= settings.start < settings.vocabulary:
        raise keys.refusal("decoder_start_token_id", settings.start, f"wanted a token below {settings.vocabulary}")


def _has_head(folder: pathlib.Path) -> bool:
    if not any(folder.glob("*.safetensors")):
        return False
    with open_tensors(find_files(folder)) as tensors:
        return "lm_head.weight" in tensors
