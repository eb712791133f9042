"""The settings of ModernBERT: its sizes, its two kinds of layers, and what its folder says of classifiers."""

import dataclasses
from typing import Literal

from mpjax.errors import UsageError
from mpjax.models.encoder.settings import Activation, Sentence
from mpjax.models.layer_kinds import LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBERTSettings:
    """The settings of a `ModernBERT`. The defaults are those of ModernBERT-base.

    Raises UsageError if `heads` does not divide `width`, or heads have an odd number of features.

    Attributes:
      vocabulary: the number of tokens.
      length: the largest number of tokens in a text.
      width: D.
      heads: the number of attention heads, a divisor of the width.
      hidden: the hidden width of the MLP.
      layers: the kind of each layer, first to last.
      activation: the activation of the gate of the MLP.
      epsilon: epsilon of the norms.
      norm_bias: whether norms have biases.
      attention_bias: whether the projections of attention have biases.
      mlp_bias: whether the layers of the MLP have biases.
      embedding_dropout: the dropout rate of embeddings, in training.
      attention_dropout: the dropout rate of the outputs of attention, in training.
      mlp_dropout: the dropout rate of the hidden features of the MLP, in training.
      sentence: how a text becomes one vector.
      classifier_pooling: how the features of tokens become the one vector that a classifier reads.
      classifier_activation: the activation of a classifier's first layer.
      classifier_bias: whether a classifier's first layer has a bias.
      classifier_dropout: the dropout rate in front of a classifier's last layer, in training.
    """

    vocabulary: int
    length: int
    width: int
    heads: int
    hidden: int
    layers: tuple[LayerKind, ...]
    activation: Literal["gelu", "tanh_gelu", "silu"] = "gelu"
    epsilon: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    sentence: Sentence = Sentence()
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: Activation = "gelu"
    classifier_bias: bool = False
    classifier_dropout: float = 0.0

    def __post_init__(self):
        if self.width % self.heads:
            raise UsageError(
                f"an encoder of width {self.width} cannot have {self.heads} heads: wanted a divisor of {self.width}"
            )
        if self.width // self.heads % 2:
            raise UsageError(
                f"a head of {self.width // self.heads} features cannot be rotated: wanted an even number, as of width "
                f"{self.width} with other than {self.heads} heads"
            )
