"""The activations of networks for images, by the names of their settings."""

from collections.abc import Callable, Mapping

import jax

from mpjax.models.activations import gelu, quick_gelu, relu, silu, tanh_gelu


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "tanh_gelu": tanh_gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
}
