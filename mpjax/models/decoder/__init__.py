"""The decoder of Llama, Mistral, Qwen, Gemma and SmolLM, its settings from `config.json`, and its weights."""

from mpjax.offers import offer


__getattr__, __dir__ = offer(__name__)
