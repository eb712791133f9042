"""Which devices run cuDNN's fused attention and mpjax's own kernels."""

from typing import Any


def why_not_on(device: Any) -> str | None:
    """The reason why such kernels cannot run on a `jax.Device`; None for an NVIDIA GPU from Ampere on."""
    if device.platform not in ("gpu", "cuda"):
        return f"needs a GPU, this is a {device.platform}"
    try:
        capability = float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD's capability is a name, such as "gfx942"
        return f"needs an NVIDIA GPU, this is a {device.device_kind}"
    if capability < 8.0:
        return f"needs compute capability 8.0, {device.device_kind} has {capability}"
    return None
