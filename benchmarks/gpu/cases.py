"""What is measured: networks at sizes that fill a GPU, each by whom and under which policy. Imports no framework."""

import dataclasses
from typing import Literal


Peer = Literal["mpjax", "torch", "linen"]
Policy = Literal["float32", "mixed_bfloat16", "mixed_float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A network, a batch, and an optimizer; the same for everyone who trains it.

    Attributes:
      name: of the network.
      batch: examples of a step.
      side: of the square images, in pixels; 0: texts.
      length: of the texts, in tokens; 0: images.
      classes: number of logits (of each pixel, or of each token, where there is one).
      width: channels of the first stage, or of a Transformer.
      stages: blocks of each stage; for a Transformer the number of blocks, for a U-Net the number of halvings, alone.
      heads: of a Transformer's attention.
      optimizer: SGD with momentum or AdamW, both with weight decay.
      weight: share of the time, relative to that of the others.
    """

    name: Literal["resnet50", "gpt2", "vit_b16", "resnet18", "unet"]
    batch: int
    side: int = 0
    length: int = 0
    classes: int
    width: int
    stages: tuple[int, ...]
    heads: int = 0
    optimizer: Literal["sgd", "adamw"]
    weight: float = 1.0

    @property
    def items(self) -> int:
        """Images or tokens of a step."""
        return self.batch * (self.length or 1)

    @property
    def pieces(self) -> int:
        """Micro-batches of a reference: GPT-2 in float32 takes 55 GB at once. Batch norms need their batch whole."""
        return min(4, self.batch) if self.length else 1

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.length else "images"

    def __str__(self) -> str:
        size = f"{self.length} tokens" if self.length else f"{self.side}x{self.side}"
        return f"{TITLES[self.name]}, {size}, batch {self.batch}"


TITLES = {
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2 small",
    "vit_b16": "ViT-B/16",
    "resnet18": "ResNet-18",
    "unet": "U-Net",
}

PATCH, EPSILON = 16, 1e-6
"""Pixels of a Vision Transformer's patch, and what the layer norms of the JAX peers add to variances."""

LEARNING_RATE = {"sgd": 0.01, "adamw": 1e-4}
MOMENTUM = 0.9
WEIGHT_DECAY = {"sgd": 5e-5, "adamw": 0.05}

CASES = (
    Case(
        name="resnet50",
        batch=256,
        side=224,
        classes=1000,
        width=64,
        stages=(3, 4, 6, 3),
        optimizer="sgd",
        weight=2.5,
    ),
    # 50304 tokens, not 50257: a multiple of 64, as those who train it from scratch pad it to.
    Case(
        name="gpt2",
        batch=32,
        length=1024,
        classes=50304,
        width=768,
        stages=(12,),
        heads=12,
        optimizer="adamw",
        weight=1.5,
    ),
    # The mean over patches in place of a class token: 196 positions, an even number, which cuDNN's attention wants.
    Case(
        name="vit_b16",
        batch=256,
        side=224,
        classes=1000,
        width=768,
        stages=(12,),
        heads=12,
        optimizer="adamw",
        weight=1.5,
    ),
    Case(name="resnet18", batch=512, side=32, classes=10, width=64, stages=(2, 2, 2, 2), optimizer="sgd"),
    Case(name="unet", batch=32, side=256, classes=21, width=64, stages=(4,), optimizer="sgd", weight=0.5),
)
"""The most important first."""

SMALL = tuple(
    dataclasses.replace(case, **size)
    for case, size in zip(
        CASES,
        (
            {"batch": 4, "side": 32, "classes": 10, "width": 8, "stages": (1, 1)},
            {"batch": 2, "length": 16, "classes": 128, "width": 32, "stages": (1,), "heads": 2},
            {"batch": 4, "side": 32, "classes": 10, "width": 32, "stages": (1,), "heads": 2},
            {"batch": 4, "side": 16, "width": 8, "stages": (1, 1)},
            {"batch": 2, "side": 16, "classes": 3, "width": 8, "stages": (1,)},
        ),
        strict=True,
    )
)
"""The same at sizes that any machine runs at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One training step.

    Attributes:
      peer: who wrote it.
      policy: its precision; float32 computes products in TF32 where the GPU has it.
      scaling: "usual": dynamic in mixed_float16, none otherwise; "none": none.
    """

    peer: Peer
    policy: Policy
    scaling: Literal["usual", "none"] = "usual"

    @property
    def dynamic(self) -> bool:
        """Whether the loss is scaled."""
        return self.policy == "mixed_float16" and self.scaling == "usual"

    def __str__(self) -> str:
        return f"{self.peer} {self.policy}" + (" without loss scaling" if self.scaling == "none" else "")


def rows_of(case: Case) -> tuple[Row, ...]:
    """Every step of a case, the most important first; the hand-written Flax loop has no U-Net."""
    rows = [
        Row(peer="mpjax", policy="mixed_bfloat16"),
        Row(peer="torch", policy="mixed_bfloat16"),
        Row(peer="mpjax", policy="float32"),
        Row(peer="mpjax", policy="mixed_float16"),
        Row(peer="mpjax", policy="mixed_float16", scaling="none"),
        Row(peer="torch", policy="mixed_float16"),
    ]
    if case.name in ("resnet50", "resnet18"):
        rows.append(Row(peer="linen", policy="mixed_float16"))
    rows.append(Row(peer="torch", policy="float32"))
    if case.name in ("resnet50", "gpt2", "vit_b16"):
        rows.append(Row(peer="linen", policy="mixed_bfloat16"))
    return tuple(rows)
