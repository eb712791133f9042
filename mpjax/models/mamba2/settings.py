"""The settings of a Mamba-2."""

from __future__ import annotations

import dataclasses

from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Settings:
    """The settings of a `Mamba2`.

    Raises UsageError if `groups` does not divide `heads`, or a group would have another width than a whole number.

    Attributes:
      vocabulary: V, the number of tokens.
      width: D.
      layers: the number of layers.
      heads: H, the number of heads.
      head_features: P, the number of features of a head.
      groups: G, the number of groups of heads that share B and C; a divisor of `heads`.
      state: N, the number of states of each feature of a head.
      taps: the number of positions that the convolution reads, the last of them its own.
      chunk: Q, the number of positions of a chunk of the scan.
      epsilon: epsilon of the norms.
      bias: whether the projections have biases.
      conv_bias: whether the convolution has a bias.
      wide_residual: whether the residual connections add in float32, in half precision too.
      steps: the smallest and the largest time step, to which the network's are clipped.
      initial_steps: the smallest and the largest initial time step.
      tied: whether the logits are products with the token embeddings.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    head_features: int
    groups: int
    state: int
    taps: int = 4
    chunk: int = 256
    epsilon: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    wide_residual: bool = True
    steps: tuple[float, float] = (0.0, float("inf"))
    initial_steps: tuple[float, float] = (0.001, 0.1)
    tied: bool = False

    def __post_init__(self):
        if self.heads % self.groups:
            raise UsageError(f"num_heads is {self.heads}: wanted a multiple of n_groups, {self.groups}")

    @property
    def inner(self) -> int:
        """The number of features of all heads."""
        return self.heads * self.head_features
