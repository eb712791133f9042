"""The field of a sound: its log-mel features."""

import dataclasses

import numpy as np

from mpjax.data.fields import FromColumn, called
from mpjax.errors import UsageError
from mpjax.precision.dtypes import is_floating


@dataclasses.dataclass(frozen=True)
class Sound(FromColumn):
    """The field of a sound as log-mel features, float32 [frames, bins] under every policy.

    Args:
      frames: the number of frames.
      bins: the number of mel bins.
    """

    frames: int
    bins: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one example."""
        return (self.frames, self.bins)

    @property
    def dtype(self) -> np.dtype:
        """float32, the dtype in a batch."""
        return np.dtype(np.float32)

    @property
    def rank(self) -> int:
        """2, the number of axes of one example: frames and bins."""
        return 2

    def settle(self, name: str, value: np.ndarray) -> np.ndarray:
        """Checks features [..., frames, bins] in float32 or float64, and casts them to float32.

        Raises:
          UsageError: the shape or the dtype differs, or a number is not finite in float32.
        """
        if value.shape[-2:] != self.shape or not is_floating(value) or value.dtype.itemsize < 4:
            raise UsageError(
                f"{called(name, self)}: {value.dtype}{list(value.shape)}; wanted log-mel features in float32, "
                f"{list(self.shape)} per example"
            )
        with np.errstate(over="ignore"):
            features = value.astype(np.float32, copy=False)
        if not np.isfinite(features).all():
            raise UsageError(f"{called(name, self)}: a number is not finite in float32; repair or remove the sound")
        return features
