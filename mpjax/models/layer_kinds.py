"""Layers of several kinds in one network: each kind has its rotary position embeddings and its attention window.

Shapes: B batch (1 for the same positions in all texts), T positions, H features per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpjax.models.rotary import Rope, Rotation, rotation


if TYPE_CHECKING:  # shapes are for readers and type checkers
    from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The position embeddings and the attention window of one layer.

    Attributes:
      rope: the rotary position embeddings of queries and keys; None for none.
      window: a position attends to itself and those less than this many away: in a decoder right before it, in an
        encoder on both sides; None for all.
    """

    rope: Rope | None = Rope()
    window: int | None = None


def attention_options(
    kinds: Sequence[LayerKind], positions: Int[Array, "B T"], *, features: int, length: int, dtype: np.dtype
) -> list[tuple[Rotation, int]]:
    """Computes the rotation and the window of each kind of layer, in which equal position embeddings share a rotation.

    Args:
      kinds: the kinds.
      positions: int32, counted from 0.
      features: H, the number of features of a head.
      length: the largest number of tokens in a text, which is the window of kinds without one.
      dtype: the dtype that the model computes in; see `mpjax.models.rotary.rotation`.
    """
    rotations = {
        rope: rotation(rope, positions, features, dtype) for rope in dict.fromkeys(kind.rope for kind in kinds)
    }
    return [(rotations[kind.rope], kind.window or length) for kind in kinds]
