"""The settings of a Whisper: its sizes."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperSettings:
    """The settings of a `Whisper`.

    Attributes:
      vocabulary: V, the number of tokens.
      bins: M, the number of mel bins of a frame.
      width: D.
      encoder_depth: the number of blocks of the encoder.
      encoder_heads: the number of its attention heads.
      encoder_hidden: the hidden width of its MLPs.
      decoder_depth: the number of blocks of the decoder.
      decoder_heads: the number of its attention heads.
      decoder_hidden: the hidden width of its MLPs.
      positions: T, the number of positions of the encoder: half as many as a sound has frames.
      length: the largest number of tokens that the decoder reads.
      dropout: the dropout rate of embeddings, and of the outputs of attention and MLP, in training.
      start: the token that the decoder reads first.
      projected: the number of features that a classifier of sounds averages over positions.
    """

    vocabulary: int
    bins: int
    width: int
    encoder_depth: int
    encoder_heads: int
    encoder_hidden: int
    decoder_depth: int
    decoder_heads: int
    decoder_hidden: int
    positions: int = 1500
    length: int = 448
    dropout: float = 0.0
    start: int = 50257
    projected: int = 256
