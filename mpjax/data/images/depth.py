"""Describes the bit depth of stored images, and reads images of more than 8 bits as fractions of their range."""

import dataclasses

import numpy as np
from PIL import Image


@dataclasses.dataclass(frozen=True)
class Depth:
    """The bit depth and range of the images of a set.

    Args:
      name: the kind of numbers, for messages; the same for all images of a set.
      bounds: the numbers that become 0 and 1. None: the files do not state them.
    """

    name: str
    bounds: tuple[float, float] | None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the images in a batch: uint8, or float32 for numbers that 8 bits cannot hold."""
        return np.dtype(np.uint8 if self.name == EIGHT.name else np.float32)

    def told(self) -> str:
        """Describes in words the kind of the stored numbers, and which of them become 0 and 1."""
        low, high = self.bounds or (0, 1)
        read = "read as they are stored" if (low, high) == (0, 1) else f"{low:g} is read as 0 and {high:g} as 1"
        return f"{self.name}, {read}"

    def fractions(self, image: Image.Image) -> np.ndarray:
        """Maps a decoded image linearly to float32 [H, W]: `bounds` become 0 and 1. Without bounds, numbers stay."""
        values = np.asarray(image)
        if _is_unsigned(image):
            values = values.view(np.uint32)
        low, high = self.bounds or (0, 1)
        if (low, high) == (0, 1):
            return values.astype(np.float32)
        return ((values.astype(np.float64) - low) / (high - low)).astype(np.float32)


EIGHT = Depth("8-bit", (0, 255))
"""The depth of most images: 0 to 255, which stay uint8 up to the device."""

SIXTEEN = Depth("16-bit grayscale", (0, 2**16 - 1))

_BITS, _FORMAT, _MEANING = 258, 339, 262  # tags of TIFF
_UNSIGNED = 1


def is_gray(mode: str) -> bool:
    """True if images of Pillow's `mode` have no colours."""
    return mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;16")


def depth_of(image: Image.Image) -> Depth:
    """The depth of an image, from its header."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        bits = int(_tag(image, _BITS, 16))
        largest = 2**bits - 1
        if _zero_is_white(image):
            return Depth(f"{bits}-bit grayscale with 0 for white", (largest, 0))
        return Depth(f"{bits}-bit grayscale", (0, largest))
    if image.mode == "I":
        kind = "unsigned" if _tag(image, _FORMAT, _UNSIGNED) == _UNSIGNED else "signed"
        return Depth(f"{kind} {int(_tag(image, _BITS, 32))}-bit grayscale", None)
    if image.mode == "F" and _zero_is_white(image):
        return Depth("floating-point grayscale with small numbers for white", None)
    if image.mode == "F":
        return Depth("floating-point grayscale", (0, 1))
    return EIGHT


def lower_bits_lost(image: Image.Image) -> bool:
    """True for an image, not yet decoded, whose 16 bits per channel Pillow reduces to 8."""
    if depth_of(image) != EIGHT:
        return False
    tiles = getattr(image, "tile", ())  # an image made from an array has no tiles
    words = [word for tile in tiles for word in (tile.args if isinstance(tile.args, tuple) else (tile.args,))]
    return any(";16" in word if isinstance(word, str) else image.format == "PPM" and word > 255 for word in words)


def _tag(image: Image.Image, tag: int, otherwise: int) -> float:
    """The first value of a TIFF tag; `otherwise` if the image lacks the tag."""
    value = getattr(image, "tag_v2", {}).get(tag, otherwise)
    return value[0] if isinstance(value, tuple) else value


def _zero_is_white(image: Image.Image) -> bool:
    """True for a TIFF in which 0 is white. Pillow inverts such numbers only if they have 8 bits."""
    return _tag(image, _MEANING, 1) == 0


def _is_unsigned(image: Image.Image) -> bool:
    """True for unsigned 32-bit numbers, which Pillow holds as int32."""
    return image.mode == "I" and _tag(image, _BITS, 16) == 32 and _tag(image, _FORMAT, _UNSIGNED) == _UNSIGNED
