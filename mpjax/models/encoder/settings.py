"""The settings of an encoder: its sizes, what differs between families, and what becomes of a whole text."""

import dataclasses
from typing import Literal

from mpjax.errors import UsageError


Pooling = Literal["mean", "cls", "max", "mean_sqrt_len"]
"""How the features of the tokens of a text become one vector: their mean, those of the first token, the largest of each
feature, or their sum over the root of the number of tokens."""


Activation = Literal["gelu", "tanh_gelu", "relu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentence:
    """How a text becomes one vector.

    Attributes:
      pooling: how the features of the tokens that are not padding become one vector.
      normalized: whether the vector is divided by its length.
    """

    pooling: Pooling = "mean"
    normalized: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The settings of an `Encoder`. The defaults are those of BERT.

    Raises UsageError if `heads` does not divide `width`.

    Attributes:
      family: whose names the weights have in files of transformers: `bert` or `roberta`.
      vocabulary: the number of tokens.
      length: the largest number of tokens in a text.
      positions: the number of position embeddings.
      width: D.
      depth: the number of blocks.
      heads: the number of attention heads, a divisor of the width.
      hidden: the hidden width of the MLP.
      segments: the number of segment embeddings, of which single texts have the first.
      padding: None where the first token has the first position embedding (BERT); else the token of padding p, which
        has position embedding p, and other tokens have those from p + 1 on (RoBERTa).
      activation: the activation of the MLP.
      epsilon: epsilon of the norms.
      dropout: the dropout rate of embeddings and of the outputs of attention and MLP, in training.
      head_dropout: the dropout rate in front of a classifier, in training.
      sentence: how a text becomes one vector.
    """

    family: Literal["bert", "roberta"] = "bert"
    vocabulary: int
    length: int
    positions: int
    width: int
    depth: int
    heads: int
    hidden: int
    segments: int = 2
    padding: int | None = None
    activation: Activation = "gelu"
    epsilon: float = 1e-12
    dropout: float = 0.1
    head_dropout: float = 0.1
    sentence: Sentence = Sentence()

    def __post_init__(self):
        if self.width % self.heads:
            raise UsageError(
                f"an encoder of width {self.width} cannot have {self.heads} heads: wanted a divisor of {self.width}"
            )
