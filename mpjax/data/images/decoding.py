"""Reads the headers of images and decodes them on the host."""

import contextlib
import dataclasses
import functools
import io
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from PIL import Image, UnidentifiedImageError

from mpjax.data.images.plain import Plain, plain_header
from mpjax.errors import DataWarning, UsageError


MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""

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


@dataclasses.dataclass(eq=False)
class Picture:
    """A stored image whose header has been read, and whose pixels have not been decoded.

    Args:
      stored: the encoded image, or an array.
      channels: the wanted channels, 1, 3 or 4.
      stored_size: width and height.
      opens: opens the image with Pillow.
      header: the header of a plain JPEG, or None.
    """

    stored: bytes | np.ndarray
    channels: int
    stored_size: tuple[int, int]
    opens: Callable[[], Image.Image]
    header: Plain | None = None

    @functools.cached_property
    def image(self) -> Image.Image:
        """Returns Pillow's image; decoding changes it, so a picture is decoded once.

        Raises:
          UsageError: the header is damaged.
        """
        with named_errors(self.stored):
            return self.opens()

    @property
    def size(self) -> tuple[int, int]:
        """Returns width and height; those to be decoded after `shrink`."""
        return self.image.size

    @property
    def mode(self) -> str:
        """Returns Pillow's mode of the wanted channels."""
        return MODES[self.channels]

    def shrink(self, width: float, height: float) -> None:
        """Lets a JPEG decode at 1/2, 1/4 or 1/8 of its size, but not below `width` and `height`: much faster."""
        self.image.draft(None, (math.ceil(width), math.ceil(height)))

    def decoded(self) -> Image.Image:
        """Decodes the image in the wanted channels.

        Raises:
          UsageError: the image is damaged.
        """
        with named_errors(self.stored):
            self.image.load()
            if self.image.mode == self.mode:
                return self.image
            if self.channels != 4 and _is_transparent(self.image):
                # The text is the same for every image, so that Python shows the warning once.
                warnings.warn(
                    "image: some images have transparent pixels, which keep the colours stored under them; to change "
                    "that, put the images on a background beforehand, or in the function of --data.preprocess",
                    DataWarning,
                    stacklevel=2,
                )
            return self.image.convert(self.mode)


def read_header(stored: bytes | np.ndarray, channels: int) -> Picture:
    """Reads the header of an encoded image of any mode (palette, grayscale and CMYK become RGB), or takes an array.

    Raises:
      UsageError: the header is damaged, or an array is not uint8 [height, width, channels] with 1, 3 or 4 channels.
    """
    if channels not in MODES:
        raise UsageError(f"image: {channels} channels; only 1, 3 or 4 can be resized; write --data.image_size 0")
    if isinstance(stored, bytes):
        with named_errors(stored):
            return _picture(opened(stored), stored, channels)
    if stored.dtype != np.uint8 or stored.ndim != 3 or stored.shape[-1] != channels:
        raise UsageError(
            f"image: {stored.dtype} {stored.shape}; only uint8 [height, width, {channels}] can be resized; "
            "write --data.image_size 0 to take images as they are stored"
        )
    return _picture(Image.fromarray(stored[..., 0] if channels == 1 else stored), stored, channels)


def _picture(image: Image.Image, stored: bytes | np.ndarray, channels: int) -> Picture:
    return Picture(stored, channels, image.size, lambda: image)


def read_plain_header(stored: bytes | np.ndarray, channels: int) -> Picture:
    """Reads a header as `read_header` does, but leaves a plain JPEG unopened: to open it takes Pillow longer.

    Raises:
      UsageError: see `read_header`.
    """
    if not isinstance(stored, bytes) or channels not in MODES:
        return read_header(stored, channels)
    header = plain_header(stored)
    if header is None or header.width * header.height > (Image.MAX_IMAGE_PIXELS or math.inf):
        return read_header(stored, channels)
    return Picture(stored, channels, (header.width, header.height), functools.partial(opened, stored), header)


def decode(stored: bytes | np.ndarray, channels: int) -> np.ndarray:
    """Decodes an encoded image at its stored size to uint8 [H, W, channels]; returns an array unchanged."""
    return pixels(read_header(stored, channels).decoded()) if isinstance(stored, bytes) else stored


def pixels(image: Image.Image) -> np.ndarray:
    """Returns uint8 [H, W, C]."""
    values = np.asarray(image)
    return values[..., None] if values.ndim == 2 else values


def _is_transparent(image: Image.Image) -> bool:
    """Returns True if an image has an alpha channel or a transparent colour, and is not fully opaque."""
    if "transparency" in image.info:
        image = image.convert("RGBA")
    if "A" not in image.getbands():
        return False
    lowest, _ = image.getchannel("A").getextrema()
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
        if isinstance(error, UnidentifiedImageError):  # Pillow names the buffer that the image was read into
            reason = f"not an image in one of the formats {', '.join(FORMATS)}"
        raise UsageError(f"{path or called}: cannot be decoded: {reason}; {advice}") from error


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
