"""What everybody trains: two models, their initial weights, the batches, and the optimizers' settings.

Weights are NumPy arrays by path, kernels in JAX's order ([H, W, in, out], [in, out], [D, heads, features]).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np


TaskName = Literal["resnet18", "vit"]
Dtype = Literal["float32", "bfloat16", "float16"]
Weights = dict[str, np.ndarray]

TASKS: tuple[TaskName, ...] = ("resnet18", "vit")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")

BATCH, SIDE, CHANNELS, CLASSES = 32, 32, 3, 10
MOMENTUM, BN_EPSILON = 0.9, 1e-5

STAGES, RESNET_WIDTH = 4, 32
"""ResNet-18 with one 3x3 convolution as its stem: four stages of two blocks of two 3x3 convolutions."""

PATCH, WIDTH, DEPTH, HEADS, LN_EPSILON = 4, 128, 4, 4, 1e-6
"""A Vision Transformer of 64 positions: pre-norm blocks, exact GELU, the mean over positions into the classifier."""

SGD: Mapping[str, Any] = {"learning_rate": 0.01, "momentum": 0.9}
"""Of the ResNet, with Nesterov's momentum."""

ADAM: Mapping[str, Any] = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
"""Of the Transformer."""

DESCRIPTIONS: dict[TaskName, str] = {
    "resnet18": f"ResNet-18, width {RESNET_WIDTH}, {SIDE}x{SIDE}, batch {BATCH}, SGD with momentum",
    "vit": f"Transformer, {DEPTH} blocks of width {WIDTH}, {HEADS} heads, 64 positions, batch {BATCH}, Adam",
}


def blocks_of_resnet() -> Iterator[tuple[int, int, int, int]]:
    """Of each block in turn: its number, channels in, channels out, stride."""
    channels = RESNET_WIDTH
    for number in range(2 * STAGES):
        stage, second = divmod(number, 2)
        out = RESNET_WIDTH * 2**stage
        yield number, channels, out, 2 if stage and not second else 1
        channels = out


def weights_of(task: TaskName) -> Weights:
    """The initial weights, the same for everybody."""
    rng = np.random.default_rng(0)
    return {name: _draw(rng, name, shape) for name, shape in {"resnet18": _resnet, "vit": _vit}[task]()}


def batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    """uint8 images [B, H, W, C] and int32 labels [B]."""
    rng = np.random.default_rng(1)
    return [
        {
            "image": rng.integers(0, 256, (BATCH, SIDE, SIDE, CHANNELS), np.uint8),
            "label": rng.integers(0, CLASSES, BATCH, np.int32),
        }
        for _ in range(count)
    ]


def _resnet() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _conv_and_norm("stem/conv", "stem/norm", 3, CHANNELS, RESNET_WIDTH)
    for number, channels, out, _ in blocks_of_resnet():
        path = f"blocks/{number}"
        yield from _conv_and_norm(f"{path}/conv1", f"{path}/norm1", 3, channels, out)
        yield from _conv_and_norm(f"{path}/conv2", f"{path}/norm2", 3, out, out)
        if channels != out:
            yield from _conv_and_norm(f"{path}/shortcut/conv", f"{path}/shortcut/norm", 1, channels, out)
    yield from _linear("head", (RESNET_WIDTH * 2 ** (STAGES - 1), CLASSES), (CLASSES,))


def _vit() -> Iterator[tuple[str, tuple[int, ...]]]:
    features = WIDTH // HEADS
    yield from _linear("patches", (PATCH, PATCH, CHANNELS, WIDTH), (WIDTH,))
    yield "positions", ((SIDE // PATCH) ** 2, WIDTH)
    for number in range(DEPTH):
        path = f"blocks/{number}"
        yield from _norm(f"{path}/norm1", WIDTH)
        for name in ("query", "key", "value"):
            yield from _linear(f"{path}/attention/{name}", (WIDTH, HEADS, features), (HEADS, features))
        yield from _linear(f"{path}/attention/out", (HEADS, features, WIDTH), (WIDTH,))
        yield from _norm(f"{path}/norm2", WIDTH)
        yield from _linear(f"{path}/mlp/up", (WIDTH, 4 * WIDTH), (4 * WIDTH,))
        yield from _linear(f"{path}/mlp/down", (4 * WIDTH, WIDTH), (WIDTH,))
    yield from _norm("norm", WIDTH)
    yield from _linear("head", (WIDTH, CLASSES), (CLASSES,))


def _conv_and_norm(conv: str, norm: str, side: int, channels: int, out: int):
    yield f"{conv}/kernel", (side, side, channels, out)
    yield from _norm(norm, out)


def _norm(path: str, width: int):
    yield f"{path}/scale", (width,)
    yield f"{path}/bias", (width,)


def _linear(path: str, kernel: tuple[int, ...], bias: tuple[int, ...]):
    yield f"{path}/kernel", kernel
    yield f"{path}/bias", bias


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Ones and zeros for scales and biases; else normal, with the variance of He et al. (arXiv:1502.01852) at most."""
    if name.endswith("scale"):
        return np.ones(shape, np.float32)
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    deviation = math.sqrt(2 / math.prod(shape[:-1])) if len(shape) == 4 else 0.02
    return (deviation * rng.standard_normal(shape)).astype(np.float32)
