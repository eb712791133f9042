"""What is asked of each framework: a small training loop that can be looked into, and parts by themselves."""

import dataclasses
from typing import Literal, Protocol

import numpy as np


Kind = Literal["line", "wide", "norm"]
"""One weight w, its loss the mean of w x; the same in float32; or w, a batch norm b, and the mean of (b(w x) - 1)^2."""

WEIGHT, RATE, MOMENTUM = 8.0, 0.25, 0.5
"""Initial w, and the settings of SGD, whose momentum is 0 without a norm."""


class NotOffered(Exception):
    """The framework has no such thing; the message says what."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a loop holds after a step.

    Attributes:
      weight: w.
      state: by name all that a skipped step must not change, the weight included.
      scale: the loss scale.
      good_steps: the counter of good steps; None if it cannot be seen.
      loss: as reported by the step.
      loss_dtype: its dtype.
      programs: how often the step was compiled; None if it never is.
    """

    weight: float
    state: dict[str, np.ndarray]
    scale: float
    good_steps: int | None
    loss: float
    loss_dtype: str
    programs: int | None


class Loop(Protocol):
    """A loop that is under way."""

    def step(self, x: np.ndarray) -> Seen:
        """Trains on the numbers x, float32 [B]."""
        ...


class Framework(Protocol):
    """The parts of a file of this folder; each may raise NotOffered."""

    def start(
        self,
        kind: Kind,
        *,
        scale: float | None = None,
        interval: int | None = None,
        factor: float | None = None,
        minimum: float | None = None,
        accumulate: int = 1,
        half_loss: bool = False,
    ) -> Loop:
        """A loop with dynamic loss scaling; None is the framework's default.

        Args:
          kind: what is trained.
          scale: the first one.
          interval: good steps until it grows.
          factor: what it grows by.
          minimum: it never goes below.
          accumulate: steps whose gradients make one update.
          half_loss: the mean is taken of the float16 output as it is, where the framework leaves that to the user.
        """
        ...

    def unscaled(self, gradients: np.ndarray, scale: float) -> np.ndarray:
        """float16 gradients [N], divided by the scale as the framework does it."""
        ...

    def norm_of(self, gradients: np.ndarray) -> float:
        """The global norm of float16 gradients [N] that arrived unscaled (scale 1)."""
        ...

    def batch_norm(
        self, x: np.ndarray, mean: float, var: float, scale: float, bias: float, *, epsilon: float, train: bool
    ) -> tuple[np.ndarray, float, float]:
        """The float16 layer on one channel, x [N, H, W]: its output, and the statistics after it (momentum 0.5)."""
        ...

    def stopped_at_floor(self) -> str | None:
        """What a run says that ends because every step overflows at the smallest scale; None if it goes on."""
        ...
