"""The settings of CLIP and SigLIP: two towers, and what makes their vectors comparable."""

import dataclasses
from typing import Literal

from mpjax.errors import UsageError
from mpjax.models.vision.settings import TowerSettings, require_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The settings of a `TextTower`. The defaults are those of SigLIP.

    Attributes:
      vocabulary: the number of tokens.
      length: the largest number of tokens in a text.
      width: D.
      depth: the number of blocks.
      heads: the number of attention heads, a divisor of the width.
      hidden: the hidden width of the MLP.
      activation: the activation of the MLP.
      epsilon: epsilon of the norms.
    """

    vocabulary: int = 32000
    length: int = 64
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    activation: Literal["gelu", "tanh_gelu", "quick_gelu"] = "tanh_gelu"
    epsilon: float = 1e-6

    def __post_init__(self):
        require_heads(self.width, self.heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTextSettings:
    """The settings of an `ImageText`.

    Raises UsageError if vectors of SigLIP's texts have another width than its tower for images.

    Attributes:
      vision: the tower for images, which says whose networks both are.
      text: the tower for texts.
      features: E, the number of features of a vector.
      scale: the initial logarithm of what cosines are multiplied by.
      bias: the initial number that is added to logits; None for none.
    """

    vision: TowerSettings
    text: TextSettings
    features: int
    scale: float
    bias: float | None

    def __post_init__(self):
        if self.vision.kind == "siglip" and self.features != self.vision.width:
            raise UsageError(
                f"text_config.projection_size is {self.features}: wanted {self.vision.width}, the width of the tower "
                "for images"
            )

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.text.vocabulary

    @property
    def length(self) -> int:
        """The largest number of tokens in a text."""
        return self.text.length
