"""Describes the bit depth of image files, and reads images of more than 8 bits as floats, usually from 0 to 1."""

import dataclasses
import re

import numpy as np
from PIL import Image


@dataclasses.dataclass(frozen=True)
class Depth:
    """The bit depth of the images of a set, and the range of their stored numbers.

    Args:
      name: the kind of numbers, such as `8-bit` or `16-bit grayscale`. It identifies the depth: all images of a set
        must have the same name.
      bounds: the stored numbers that become 0 and 1; the first may be the larger. None: the files do not state them.
    """

    name: str
    bounds: tuple[float, float] | None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the images in a batch: uint8 for the depth `EIGHT`, float32 for any other."""
        return np.dtype(np.uint8 if self.name == EIGHT.name else np.float32)

    def told(self) -> str:
        """Describes in words, for a message, the kind of the stored numbers and which of them become 0 and 1."""
        low, high = self.bounds or (0, 1)
        read = "read as they are stored" if (low, high) == (0, 1) else f"{low:g} is read as 0 and {high:g} as 1"
        return f"{self.name}, {read}"

    def fractions(self, image: Image.Image) -> np.ndarray:
        """Maps the stored numbers of a grayscale image linearly to float32 [H, W]: `bounds` become 0 and 1.

        Numbers outside the bounds are not clipped. If the bounds are None or (0, 1), numbers are only cast. The image
        must not be decoded yet (`stored_numbers`), and is decoded here.
        """
        values = stored_numbers(image)
        low, high = self.bounds or (0, 1)
        if (low, high) == (0, 1):
            return values.astype(np.float32)
        return ((values.astype(np.float64) - low) / (high - low)).astype(np.float32)


EIGHT = Depth("8-bit", (0, 255))
"""The depth of most images: 0 to 255, which stay uint8 up to the device."""

SIXTEEN = Depth("16-bit grayscale", (0, 2**16 - 1))

_BITS, _FORMAT, _MEANING = 258, 339, 262  # tags of TIFF
_UNSIGNED, _SIGNED = 1, 2


def is_gray(mode: str) -> bool:
    """True if images of Pillow's `mode` are grayscale by definition: black and white, gray with or without alpha."""
    return mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;16")


def depth_of(image: Image.Image) -> Depth:
    """Finds the depth of an image from its header, before it is decoded.

    It is `EIGHT` for all images of 8 bits or fewer and for all colour images, whose channels Pillow reduces to 8 bits.
    Grayscale of up to 16 bits is named by its bits, with the bounds 0 and the largest number that the format holds,
    reversed if 0 is white. Floats have the bounds 0 and 1. The bounds are None for signed integers, 32-bit integers
    and floats with small numbers for white, because files do not state their range.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        largest = _largest(image) or 2 ** int(_tag(image, _BITS, 16)) - 1
        name = _named(largest)
        if _zero_is_white(image):
            return Depth(f"{name} with 0 for white", (largest, 0))
        return Depth(name, (0, largest))
    if _is_signed_byte(image):
        return Depth("signed 8-bit grayscale", None)
    if image.mode == "I":
        kind = "unsigned" if _tag(image, _FORMAT, _UNSIGNED) == _UNSIGNED else "signed"
        return Depth(f"{kind} {int(_tag(image, _BITS, 32))}-bit grayscale", None)
    if image.mode == "F" and _zero_is_white(image):
        return Depth("floating-point grayscale with small numbers for white", None)
    if image.mode == "F":
        return Depth("floating-point grayscale", (0, 1))
    return EIGHT


def stored_numbers(image: Image.Image) -> np.ndarray:
    """Decodes an image of one channel to the numbers in its file, [H, W]; the palette of an image is not applied.

    Pillow scales numbers of 2 or 4 bits to 8, and numbers of a PGM from its largest one to 255 or 65,535; this is
    undone. Signed 8-bit numbers become int8 and unsigned 32-bit numbers uint32; other dtypes are as Pillow has them.
    Pillow forgets its scale when it decodes, so the image must not be decoded yet.
    """
    largest = _largest(image)
    values = np.asarray(image)
    if largest:
        scale = 255 if image.mode == "L" else 2**16 - 1
        return np.rint(values * (largest / scale)).astype(values.dtype)
    if _is_signed_byte(image):
        return values.view(np.int8)
    return values.view(np.uint32) if _is_unsigned(image) else values


def _largest(image: Image.Image) -> int | None:
    """Finds the stored number of a gray image that Pillow scales to 255 or 65,535; None if Pillow does not scale it."""
    if image.mode not in ("L", "I"):
        return None
    for words in _words_of_tiles(image):
        if image.format == "PPM" and isinstance(words[-1], int):
            return words[-1]
        if bits := re.match(r"L;([24])", str(words[0])):
            return 2 ** int(bits[1]) - 1
    return None


def _named(largest: int) -> str:
    bits = largest.bit_length()
    return f"{bits}-bit grayscale" if largest == 2**bits - 1 else f"grayscale up to {largest}"


def lower_bits_lost(image: Image.Image) -> bool:
    """True for an image, not yet decoded, whose channels of over 8 bits Pillow reduces to 8, such as 16-bit RGB."""
    if depth_of(image) != EIGHT:
        return False
    words = [word for words in _words_of_tiles(image) for word in words]
    return any(";16" in word if isinstance(word, str) else image.format == "PPM" and word > 255 for word in words)


def _words_of_tiles(image: Image.Image) -> list[tuple]:
    """Collects the arguments of Pillow's decoder for each tile of an image that is not yet decoded.

    The first argument of a tile usually names the stored layout, such as `L;4`. The list is empty for a decoded image
    and for one made from an array.
    """
    tiles = getattr(image, "tile", ())  # an image made from an array has no tiles
    return [tile.args if isinstance(tile.args, tuple) else (tile.args,) for tile in tiles]


def _tag(image: Image.Image, tag: int, otherwise: int) -> float:
    """Reads the first value of the TIFF tag numbered `tag`; `otherwise` if the image lacks it or is no TIFF."""
    value = getattr(image, "tag_v2", {}).get(tag, otherwise)
    return value[0] if isinstance(value, tuple) else value


def _zero_is_white(image: Image.Image) -> bool:
    """True for a TIFF in which 0 is white. Pillow inverts such numbers only if they have 8 bits."""
    return _tag(image, _MEANING, 1) == 0


def _is_signed_byte(image: Image.Image) -> bool:
    """True for a TIFF of signed 8-bit numbers, which Pillow reads as unsigned ones."""
    return image.mode == "L" and _tag(image, _FORMAT, _UNSIGNED) == _SIGNED


def _is_unsigned(image: Image.Image) -> bool:
    """True for a TIFF of unsigned 32-bit numbers, which Pillow holds as int32."""
    return image.mode == "I" and _tag(image, _BITS, 16) == 32 and _tag(image, _FORMAT, _UNSIGNED) == _UNSIGNED
