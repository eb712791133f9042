"""The decoder of Llama, Mistral, Qwen, Gemma and SmolLM, its settings from `config.json`, and its weights."""

from mpjax.models.decoder.network import Decoder
from mpjax.models.decoder.settings import DecoderSettings, LayerKind


__all__ = ["Decoder", "DecoderSettings", "LayerKind"]
