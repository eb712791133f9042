"""Reads the settings of a Mamba-2 from a `config.json` of Hugging Face transformers, and refuses what it does not know.

Defaults of missing keys are those of transformers.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.errors import UsageError
from mpjax.models.config_keys import ConfigKeys, read_config
from mpjax.models.mamba2.settings import Mamba2Settings
from mpjax.strict_json import encode


FAMILIES: Mapping[str, str] = {"mamba2": "Mamba2ForCausalLM"}
"""The class of transformers for each `model_type`."""


def read_settings(folder: pathlib.Path) -> Mamba2Settings:
    """Reads the settings of the Mamba-2 in a folder of Hugging Face files.

    Raises:
      UsageError: there is no config.json, it is damaged, or `settings_of` refuses it; the message names the file.
    """
    return read_config(folder, settings_of)


def settings_of(config: Mapping[str, Any]) -> Mamba2Settings:
    """Converts the content of a `config.json` to the settings of a Mamba-2.

    Raises:
      UsageError: it is of another network; a key is missing, unknown, or has a value that the network cannot have.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"wanted a JSON object, got {type(config).__name__}")
    keys = ConfigKeys(config, network="Mamba-2")
    family = keys.one_of("model_type", FAMILIES)
    if (named := config.get("architectures")) not in (None, [FAMILIES[family]]):
        raise UsageError(f"architectures is {encode(named)}: wanted [{encode(FAMILIES[family])}] for {family}")
    width, heads, features = keys.size("hidden_size", 4096), keys.size("num_heads", 128), keys.size("head_dim", 64)
    expand = keys.take("expand", float, 2)
    if width * expand != heads * features:
        raise keys.refusal("expand", expand, f"wanted num_heads x head_dim / hidden_size, {heads * features / width:g}")
    keys.one_of("hidden_act", {"silu": 0, "swish": 0}, "silu")
    keys.only("rms_norm", True)
    # Initial values, and what transformers does not read.
    keys.unused("rescale_prenorm_residual", "time_step_rank", "time_step_floor", "norm_before_gate", "layer_types")
    settings = Mamba2Settings(
        vocabulary=keys.size("vocab_size", 32768),
        width=width,
        layers=keys.size("num_hidden_layers", 64),
        heads=heads,
        head_features=features,
        groups=keys.size("n_groups", 8),
        state=keys.size("state_size", 128),
        taps=keys.size("conv_kernel", 4),
        chunk=keys.size("chunk_size", 256),
        epsilon=keys.number("layer_norm_epsilon", 1e-5),
        bias=keys.take("use_bias", bool, False),
        conv_bias=keys.take("use_conv_bias", bool, True),
        wide_residual=keys.take("residual_in_fp32", bool, True),
        steps=_steps(keys),
        initial_steps=(keys.number("time_step_min", 0.001), keys.number("time_step_max", 0.1)),
        tied=keys.take("tie_word_embeddings", bool, False),
    )
    keys.refuse_rest()
    return settings


_INFINITE = ({"__float__": "Infinity"}, "Infinity", "inf")
"""The forms of infinity in JSON, beside the word that `json` reads as a number."""


def _steps(keys: ConfigKeys) -> tuple[float, float]:
    limits = keys.take("time_step_limit", list, [0.0, math.inf])
    numbers = [math.inf if limit in _INFINITE else limit for limit in limits]
    if len(numbers) != 2 or not all(isinstance(number, int | float) for number in numbers):
        raise keys.refusal("time_step_limit", limits, "wanted two numbers")
    low, high = map(float, numbers)
    if not 0 <= low <= high:
        raise keys.refusal("time_step_limit", limits, "wanted two numbers, at least 0, the smaller one first")
    return low, high
