"""Attention in a plan: traced as on the GPU that is planned for, which no one can ask about its abilities."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from mpjax.plan.devices import Gpu
from mpjax.plan.target import CUDNN


@contextlib.contextmanager
def traced_for(gpu: Gpu, device: Any, implementation: str) -> Iterator[None]:
    """Models choose their attention while they are traced, by JAX's default device: here that of the plan.

    Args:
      gpu: what JAX is told where it asks the device about its abilities.
      device: of the GPU's mesh.
      implementation: "auto" or "cudnn", or "xla": attention as on a CPU, where there is no other.
    """
    if implementation == "xla":
        with jax.default_device(jax.devices("cpu")[0]):
            yield
        return
    # JAX asks the libraries and the device that are present, and there are none.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    major, minor, patch = CUDNN
    answers = {
        "check_cudnn_version": lambda: major * 10_000 + minor * 100 + patch,
        "check_compute_capability": lambda wanted: gpu.capability >= _numbers(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: gpu.capability == _numbers(wanted),
    }
    before = {name: getattr(fused, name) for name in answers if hasattr(fused, name)}
    try:
        for name in before:
            setattr(fused, name, answers[name])
        with jax.default_device(device):
            yield
    finally:
        for name, function in before.items():
            setattr(fused, name, function)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
