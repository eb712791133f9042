"""The activations of encoders, by their names in a `config.json` of Hugging Face transformers."""

from collections.abc import Mapping

from mpjax.models.encoder.settings import Activation


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
}
