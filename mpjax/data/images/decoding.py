"""Reads the headers of images and decodes, crops and resizes them on the host."""

import contextlib
import io
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from mpjax.errors import DataWarning, UsageError


Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a crop, in pixels of the stored image."""

Frame = Callable[[int, int, np.random.Generator], Box]
"""A function from the width and height of an image to its crop; only random crops use the generator."""

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats that images may be stored in, as Pillow names them."""


class FileBytes(bytes):
    """The content of a file, with its path for error messages."""

    path: str

    @classmethod
    def read(cls, path: str) -> "FileBytes":
        """Reads the file at `path`.

        Raises:
          UsageError: it is not a regular file; reading a pipe would block forever.
        """
        require_regular(path)
        with open(path, "rb") as file:
            content = cls(file.read())
        content.path = path
        return content


def require_regular(path: str) -> None:
    """Raises UsageError if `path` is a pipe, a socket, a device or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(f"{path}: not a regular file; wanted an image; remove it from the folder")


def name_of(stored: object) -> str:
    """Returns the path of an image that was read from a file, or an empty string."""
    return getattr(stored, "path", "")


def decode(stored: bytes | np.ndarray, channels: int) -> np.ndarray:
    """Decodes an encoded image at its stored size to uint8 [H, W, channels]; returns an array unchanged."""
    return _pixels(_converted(_picture(stored, channels), channels, stored)) if isinstance(stored, bytes) else stored


def size_of(stored: bytes | np.ndarray, channels: int) -> tuple[int, int]:
    """Returns the width and height of an image; an encoded image is not decoded."""
    return _picture(stored, channels).size


def resize(
    stored: bytes | np.ndarray, channels: int, size: int, box: Box, *, resample: Resampling = Resampling.BILINEAR
) -> np.ndarray:
    """Crops an image to `box` and resizes the crop to uint8 [size, size, channels].

    Args:
      stored: an encoded image of any mode (palette, grayscale and CMYK become RGB), or a uint8 array [H, W, C].
      channels: 1, 3 or 4.
      size: the side of the result.
      box: the crop.
      resample: antialiased linear interpolation, or `Resampling.NEAREST` for class numbers.

    Raises:
      UsageError: the image cannot be decoded, is not uint8, or has a number of channels that cannot be resized.
    """
    picture = _picture(stored, channels)
    width, height = picture.size
    side = min(box[2] - box[0], box[3] - box[1])
    # A JPEG decodes much faster at 1/2, 1/4 or 1/8 of its size; `draft` never goes below the wanted size.
    picture.draft(None, (int(np.ceil(width * size / side)), int(np.ceil(height * size / side))))
    across, down = picture.width / width, picture.height / height
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    picture = _converted(picture, channels, stored)
    return _pixels(picture.resize((size, size), resample, box=box))


def centre(share: float = 1.0) -> Frame:
    """Returns a frame that crops the centre square; its side is `share` of the image's shorter side.

    >>> centre()(200, 100, None)
    (50.0, 0.0, 150.0, 100.0)
    """

    def frame(width: int, height: int, rng: np.random.Generator) -> Box:
        del rng
        side = min(width, height) * share
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return frame


def random_part(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draws a random crop of 8% to 100% of the area and an aspect ratio of 3:4 to 4:3.

    If none of ten draws fits into the image, it returns the centre square.
    """
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        across, down = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = rng.uniform(0, width - across), rng.uniform(0, height - down)
            return float(left), float(top), float(left + across), float(top + down)
    return centre()(width, height, rng)


def _picture(stored: bytes | np.ndarray, channels: int) -> Image.Image:
    if channels not in _MODES:
        raise UsageError(f"image: {channels} channels; only 1, 3 or 4 can be resized; write --data.image_size 0")
    if isinstance(stored, bytes):
        with named_errors(stored):
            return opened(stored)
    if stored.dtype != np.uint8 or stored.ndim != 3 or stored.shape[-1] != channels:
        raise UsageError(
            f"image: {stored.dtype} {stored.shape}; only uint8 [height, width, {channels}] can be resized; "
            "write --data.image_size 0 to take images as they are stored"
        )
    return Image.fromarray(stored[..., 0] if channels == 1 else stored)


def _converted(picture: Image.Image, channels: int, stored: bytes | np.ndarray) -> Image.Image:
    with named_errors(stored):
        picture.load()
        if picture.mode == _MODES[channels]:
            return picture
        if channels != 4 and _is_transparent(picture):
            # The text is the same for every image, so that Python shows the warning once.
            warnings.warn(
                "image: some images have transparent pixels, which keep the colours stored under them; to change that, "
                "put the images on a background beforehand, or in the function of --data.preprocess",
                DataWarning,
                stacklevel=2,
            )
        return picture.convert(_MODES[channels])


def _is_transparent(picture: Image.Image) -> bool:
    """Returns True if an image has an alpha channel or a transparent colour, and is not fully opaque."""
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if "A" not in picture.getbands():
        return False
    lowest, _ = picture.getchannel("A").getextrema()
    return isinstance(lowest, int | float) and lowest < 255


def opened(stored: bytes | str) -> Image.Image:
    """Opens an image in one of `FORMATS`, whatever its extension; for EPS and others Pillow would start programs."""
    return Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored, formats=FORMATS)


@contextlib.contextmanager
def named_errors(stored: object, called: str = "image") -> Iterator[None]:
    """Converts any error that Pillow raises for a damaged image into one that names the image.

    Pillow raises many types: SyntaxError, struct.error, errors of the image's size and others.

    Raises:
      UsageError: the image is damaged; the message says how.
    """
    try:
        yield
    except (UsageError, Warning, MemoryError):
        raise
    except Exception as error:
        path = stored if isinstance(stored, str) else name_of(stored)
        advice = "repair or remove the file" if path else "prepare the data set again"
        reason = str(error) or type(error).__name__
        raise UsageError(f"{path or called}: cannot be decoded: {reason}; {advice}") from error


def _pixels(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels[..., None] if pixels.ndim == 2 else pixels


SAMPLE = 1000
_GRAY = {"1", "L", "LA"}
_DEEP = ("I", "F")  # the first letters of Pillow's modes with more than 8 bits


def stored_shape(count: int, open_at: Callable[[int], bytes | str], called: str) -> tuple[int | None, int | None, int]:
    """Returns the shape [H, W, C] of the images of a set, from the headers of up to `SAMPLE` evenly spaced ones.

    Reading the headers of a million files takes minutes. If all sampled images have one size, an image outside the
    sample with another size is refused when it is read.

    Args:
      count: the number of images in the set.
      open_at: a function from an index to the image's bytes or its path; only the header of a file is read.
      called: the name of the images in error messages.

    Returns:
      H and W are None if they vary. C is 1 if all sampled images are grayscale, else 3.

    Raises:
      UsageError: a sampled image cannot be decoded, or has more than 8 bits per channel.
    """
    chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    sizes, modes = _headers((open_at(int(index)) for index in chosen), called)
    width, height = sizes.pop() if len(sizes) == 1 else (None, None)
    return height, width, 1 if modes <= _GRAY else 3


def evenly(sequences: Sequence[Sequence]) -> tuple[int, Callable[[int], tuple[int, int]]]:
    """Returns the total length of several sequences, and a function from an index in all to (sequence, index in it).

    >>> length, at = evenly(["ab", "cde"])
    >>> length, at(3)
    (5, (1, 1))
    """
    ends = np.cumsum([len(sequence) for sequence in sequences])

    def at(index: int) -> tuple[int, int]:
        which = int(np.searchsorted(ends, index, side="right"))
        return which, index - (int(ends[which - 1]) if which else 0)

    return int(ends[-1]), at


def _headers(images: Iterable[bytes | str], called: str) -> tuple[set[tuple[int, int]], set[str]]:
    sizes, modes = set(), set()
    for stored in images:
        where = stored if isinstance(stored, str) else called
        if isinstance(stored, str):
            require_regular(stored)
        with named_errors(stored, called), opened(stored) as picture:
            sizes.add(picture.size)
            modes.add(picture.mode)
            mode = picture.mode
        if mode.startswith(_DEEP):
            raise UsageError(
                f"{where}: more than 8 bits per channel (Pillow's mode {mode}); wanted 8-bit images; convert them"
            )
    return sizes, modes
