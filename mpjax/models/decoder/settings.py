"""The settings of a decoder: its sizes, and what differs between the published families."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpjax.errors import UsageError
from mpjax.models.layer_kinds import LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """The settings of the mixtures of experts of a decoder. Raises UsageError if a token has more experts than exist.

    Attributes:
      count: E, the number of experts of a layer.
      each: K, the number of experts of a token.
      hidden: the hidden width of an expert.
      normalised: whether the weights of a token's experts are divided by their sum.
      sparse: for each layer, whether it has experts; others have an MLP.
      balance: the factor of the load-balancing loss; 0 for none.
      files: the names in files: those of Mixtral, or those of Qwen 3 and OLMoE.
    """

    count: int
    each: int
    hidden: int
    normalised: bool
    sparse: tuple[bool, ...]
    balance: float
    files: Literal["mixtral", "qwen"] = "qwen"

    def __post_init__(self):
        if self.each > self.count:
            raise UsageError(f"num_experts_per_tok is {self.each}: there are {self.count} experts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """The settings of a `Decoder`. The defaults are those of Llama.

    Raises UsageError if `key_heads` does not divide `heads`, or `head_features` is odd.

    Attributes:
      vocabulary: V, the number of tokens.
      length: the largest number of tokens in a text.
      width: D.
      heads: N, the number of query heads.
      key_heads: K, the number of key and value heads, a divisor of `heads`.
      head_features: H, the number of features of a head; even.
      hidden: the hidden width of the MLP.
      layers: the kind of each layer, first to last.
      activation: the activation of the gate of the MLP.
      epsilon: epsilon of the norms.
      norm_offset: the number that is added to the scales of norms: 1 in Gemma, whose files store scale - 1.
      norms_after: whether the outputs of attention and MLP are normalized before the residual connection (Gemma).
      norms_of_heads: whether the queries and keys of each head have a norm (Qwen 3, Gemma 3).
      norms_of_projections: whether the queries and keys of all heads together have a norm (OLMoE).
      qkv_bias: whether the projections to query, key and value have biases.
      out_bias: whether the output projection of attention has a bias.
      mlp_bias: whether the layers of the MLP have biases.
      embedding_scale: the factor of the token embeddings: sqrt(D) in Gemma.
      score_scale: the factor of attention scores; None: 1 / sqrt(H).
      score_cap: the limit of attention scores (`mpjax.precision.attention.soft_cap`); None for none.
      logit_cap: the limit of logits; None for none.
      tied: whether the logits are products with the token embeddings, in place of a layer of their own.
      experts: the mixtures of experts in place of MLPs; None for none.
    """

    vocabulary: int
    length: int
    width: int
    heads: int
    key_heads: int
    head_features: int
    hidden: int
    layers: tuple[LayerKind, ...]
    activation: Literal["silu", "tanh_gelu"] = "silu"
    epsilon: float = 1e-5
    norm_offset: float = 0.0
    norms_after: bool = False
    norms_of_heads: bool = False
    norms_of_projections: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    tied: bool = False
    experts: ExpertSettings | None = None

    def __post_init__(self):
        if self.heads % self.key_heads:
            raise UsageError(
                f"a decoder of {self.heads} heads cannot have {self.key_heads} key and value heads: wanted a divisor "
                f"of {self.heads}"
            )
        if self.head_features % 2:
            raise UsageError(f"a head of {self.head_features} features cannot be rotated: wanted an even number")
