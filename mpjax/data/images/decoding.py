"""Images on the host: what their headers say, decoding, cropping and resizing."""

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
"""Left, top, right and bottom of the part of an image that is wanted."""

Frame = Callable[[int, int, np.random.Generator], Box]
"""From the width and height of an image to the part that is wanted; only random frames draw."""

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow's names of those that images may be stored in."""


class FileBytes(bytes):
    """The content of a file; messages name the file."""

    path: str

    @classmethod
    def read(cls, path: str) -> "FileBytes":
        """The file at `path`.

        Raises:
          UsageError: it is no regular file: to read a pipe would wait forever.
        """
        require_regular(path)
        with open(path, "rb") as file:
            content = cls(file.read())
        content.path = path
        return content


def require_regular(path: str) -> None:
    """Raises UsageError where `path` is a pipe, a socket or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(f"{path}: no regular file; wanted an image; remove it from the folder")


def name_of(stored: object) -> str:
    """The path of an image that was a file; empty for any other."""
    return getattr(stored, "path", "")


def decode(stored: bytes | np.ndarray, channels: int) -> np.ndarray:
    """The image as stored: [H, W, channels] uint8 if it was encoded, the same array if it was one."""
    return _pixels(_converted(_picture(stored, channels), channels, stored)) if isinstance(stored, bytes) else stored


def size_of(stored: bytes | np.ndarray, channels: int) -> tuple[int, int]:
    """Width and height of an image; of an encoded one without decoding it."""
    return _picture(stored, channels).size


def resize(
    stored: bytes | np.ndarray, channels: int, size: int, box: Box, *, resample: Resampling = Resampling.BILINEAR
) -> np.ndarray:
    """The part of an image inside `box`, as [size, size, channels] uint8.

    Args:
      stored: an encoded image of any mode (palette, grayscale and CMYK become RGB), or a uint8 array [H, W, C].
      channels: 1, 3 or 4.
      size: side of the result.
      box: which part.
      resample: antialiased linear interpolation, or, for class numbers, `Resampling.NEAREST`.

    Raises:
      UsageError: the image cannot be decoded, or is not one that can be resized.
    """
    picture = _picture(stored, channels)
    width, height = picture.size
    side = min(box[2] - box[0], box[3] - box[1])
    # A JPEG can be decoded at 1/2, 1/4 or 1/8, much faster; never below the size that is wanted.
    picture.draft(None, (int(np.ceil(width * size / side)), int(np.ceil(height * size / side))))
    across, down = picture.width / width, picture.height / height
    box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    picture = _converted(picture, channels, stored)
    return _pixels(picture.resize((size, size), resample, box=box))


def centre(share: float = 1.0) -> Frame:
    """The square in the middle whose side is `share` of the shorter side."""

    def frame(width: int, height: int, rng: np.random.Generator) -> Box:
        del rng
        side = min(width, height) * share
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return frame


def random_part(width: int, height: int, rng: np.random.Generator) -> Box:
    """A random part: 8% to 100% of the area, 3:4 to 4:3 in ratio, anywhere; the middle where ten draws do not fit."""
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
        raise UsageError(f"image: {channels} channels; only images of 1, 3 or 4 are resized; write --data.image_size 0")
    if isinstance(stored, bytes):
        with decoding(stored):
            return opened(stored)
    if stored.dtype != np.uint8 or stored.ndim != 3 or stored.shape[-1] != channels:
        raise UsageError(
            f"image: {stored.dtype} {stored.shape}; only uint8 [height, width, {channels}] is resized; "
            "write --data.image_size 0 to take images as they are stored"
        )
    return Image.fromarray(stored[..., 0] if channels == 1 else stored)


def _converted(picture: Image.Image, channels: int, stored: bytes | np.ndarray) -> Image.Image:
    with decoding(stored):
        picture.load()
        if picture.mode == _MODES[channels]:
            return picture
        if channels != 4 and _is_transparent(picture):
            # In the same words for every image, so that it is told once.
            warnings.warn(
                "image: some have transparent pixels, which are taken in the colours stored under them; to have it "
                "otherwise, put the images on a background before, or in the function of --data.preprocess",
                DataWarning,
                stacklevel=2,
            )
        return picture.convert(_MODES[channels])


def _is_transparent(picture: Image.Image) -> bool:
    """Whether an image has an alpha channel, or a colour that stands for one, and is not opaque everywhere."""
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    if "A" not in picture.getbands():
        return False
    lowest, _ = picture.getchannel("A").getextrema()
    return isinstance(lowest, int | float) and lowest < 255


def opened(stored: bytes | str) -> Image.Image:
    """An image in one of `FORMATS`, whatever its name ends in; for EPS and others Pillow would start other programs."""
    return Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored, formats=FORMATS)


@contextlib.contextmanager
def decoding(stored: object, called: str = "image") -> Iterator[None]:
    """Names the image in whatever Pillow raises at a damaged one: errors of syntax, of struct, of its size and others.

    Raises:
      UsageError: says what is wrong with it.
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
_DEEP = ("I", "F")  # how the names of modes of more than 8 bits begin


def stored_shape(count: int, open_at: Callable[[int], bytes | str], called: str) -> tuple[int | None, int | None, int]:
    """The shape [H, W, C] of the images of a set, judged by up to `SAMPLE` of them, evenly spread.

    Reading the headers of a million files takes minutes; an image beyond the sample that has another size than all in
    it is refused when it is read.

    Args:
      count: images in the set.
      open_at: the image at an index: its bytes, or its path, of which only the header is read.
      called: what messages call the images.

    Returns:
      H and W are None where they vary; C is 1 where all are grayscale, else 3.

    Raises:
      UsageError: one of them is no image, or has more than 8 bits.
    """
    chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    sizes, modes = _headers((open_at(int(index)) for index in chosen), called)
    width, height = sizes.pop() if len(sizes) == 1 else (None, None)
    return height, width, 1 if modes <= _GRAY else 3


def evenly(sequences: Sequence[Sequence]) -> tuple[int, Callable[[int], tuple[int, int]]]:
    """Several sequences as one: how long it is, and from an index in it to (which sequence, index there)."""
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
        with decoding(stored, called), opened(stored) as picture:
            sizes.add(picture.size)
            modes.add(picture.mode)
            mode = picture.mode
        if mode.startswith(_DEEP):
            raise UsageError(
                f"{where}: more than 8 bits per channel (Pillow's mode {mode}); wanted 8-bit images; convert them"
            )
    return sizes, modes
