"""The settings of a T5: its sizes, and what differs between the published families."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Settings:
    """The settings of a `T5`. The defaults are those of T5 v1.0.

    Attributes:
      vocabulary: V, the number of tokens.
      width: D.
      heads: N, the number of attention heads.
      head_features: H, the number of features of a head; N times H need not be D.
      hidden: the hidden width of the MLP.
      encoder_depth: the number of blocks of the encoder.
      decoder_depth: the number of blocks of the decoder.
      buckets: the number of groups of distances between positions, each with a bias for each head.
      farthest: the distance from which on all are in one group.
      activation: the activation of the MLP, or of its gate if that is `gated`.
      gated: whether the hidden features are products with those of a gate (v1.1, FLAN-T5, mT5).
      epsilon: epsilon of the norms.
      dropout: the dropout rate of embeddings, of hidden features, of the outputs of attention and MLP, and of the
        features of both stacks, in training.
      tied: whether the logits are products with the token embeddings, in place of a layer of their own.
      scaled: whether the features are divided by the root of D in front of the logits.
      start: the token that the decoder reads first.
    """

    vocabulary: int
    width: int
    heads: int
    head_features: int
    hidden: int
    encoder_depth: int
    decoder_depth: int
    buckets: int = 32
    farthest: int = 128
    activation: Literal["relu", "tanh_gelu", "silu"] = "relu"
    gated: bool = False
    epsilon: float = 1e-6
    dropout: float = 0.1
    tied: bool = True
    scaled: bool = True
    start: int = 0
