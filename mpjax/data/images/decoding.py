"""Opens image files and arrays, and decodes them on the host with Pillow."""

import contextlib
import dataclasses
import functools
import io
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterator

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from mpjax.data.images.depth import EIGHT, Depth, depth_of, is_gray, lower_bits_lost
from mpjax.data.images.plain import Plain, plain_header
from mpjax.errors import DataWarning, UsageError, is_exhausted


MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The accepted image formats, as Pillow names them."""


class FileBytes(bytes):
    """The content of a file, with its `path` for error messages. Only `read` and `of` set the path."""

    path: str

    @classmethod
    def of(cls, stored: bytes, path: str) -> "FileBytes":
        """Copies bytes that were read from a part of a file; `path` names that part."""
        content = cls(stored)
        content.path = path
        return content

    @classmethod
    def read(cls, path: str) -> "FileBytes":
        """Reads the whole file at `path`.

        Raises:
          UsageError: the path is not a regular file, such as a pipe, which would block forever, or a folder.
          OSError: the file does not exist or cannot be read.
        """
        require_regular(path)
        with open(path, "rb") as file:
            return cls.of(file.read(), path)


def require_regular(path: str) -> None:
    """Raises UsageError if `path` is a pipe, a socket, a device or a folder, and OSError if nothing is there.

    A symbolic link to a regular file is accepted.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UsageError(f"{path}: not a regular file; wanted an image; remove it from the folder")


def name_of(stored: object) -> str:
    """Finds the path of an encoded image that `FileBytes.read` read; empty for other bytes and for arrays."""
    return getattr(stored, "path", "")


@dataclasses.dataclass(eq=False)
class Picture:
    """A stored image whose header is read, but whose pixels are not decoded.

    Args:
      stored: the encoded image, or an array of pixels.
      channels: the number of channels to decode to: 1, 3 or 4.
      stored_size: width and height in pixels, as stored.
      opens: a function that opens the image with Pillow; called once, when `image` is first used.
      header: the header of a plain JPEG (`plain_header`), or None.
      depth: the bit depth that the image must have, the same for all images of the set.
    """

    stored: bytes | np.ndarray
    channels: int
    stored_size: tuple[int, int]
    opens: Callable[[], Image.Image]
    header: Plain | None = None
    depth: Depth = EIGHT

    @functools.cached_property
    def image(self) -> Image.Image:
        """Pillow's image, opened at the first access and cached. Decoding changes it, so decode a picture only once.

        Raises:
          UsageError: the header is damaged.
        """
        with named_errors(self.stored):
            return self.opens()

    @property
    def size(self) -> tuple[int, int]:
        """The width and height that `decoded` will have: the stored size, or a fraction of it after `shrink`."""
        return self.image.size

    @property
    def mode(self) -> str:
        """The mode of Pillow that 8-bit pixels are decoded to, by `channels`: `L`, `RGB` or `RGBA`."""
        return MODES[self.channels]

    def shrink(self, width: float, height: float) -> None:
        """Makes a JPEG decode at the smallest of 1, 1/2, 1/4 and 1/8 of its size that has at least `width` x `height`.

        It changes `image` and `size` in place. Images of other formats keep their size.
        """
        self.image.draft(None, (math.ceil(width), math.ceil(height)))

    def decoded(self) -> Image.Image:
        """Decodes the image to `channels` channels of 8 bits each, or an image of another depth to floats of mode F.

        In mode F, which has one channel, the range of `depth` is mapped to 0 and 1. Palettes, CMYK and other modes are
        converted. A DataWarning tells of the lower bits of 16-bit channels, which are lost, and of transparency, which
        is dropped unless there are 4 channels. Call it once, because it changes `image`.

        Raises:
          UsageError: the image is damaged, its depth differs from `depth`, or it has colours and `channels` is 1.
        """
        with named_errors(self.stored):
            image = self.image
            depth, lost = depth_of(image), lower_bits_lost(image)  # Pillow forgets them when it decodes
            called = name_of(self.stored) or "image"
            if depth.name != self.depth.name:
                raise UsageError(
                    f"{called}: {depth.name} (Pillow's mode {image.mode}), but the set has {self.depth.name} images, "
                    "which are read in another range; wanted one kind in a set: convert the file, or remove it"
                )
            if lost:
                _tell(
                    "some images have 16 bits per channel, of which Pillow reads the upper 8; to keep all, store "
                    "16-bit grayscale, or arrays (docs/extending.md)"
                )
            if depth.name == EIGHT.name:
                image.load()
            if self.channels != 4 and _is_transparent(image):
                _tell(
                    "some images have transparent pixels, which keep the colours stored under them; to change that, "
                    "put the images on a background beforehand, or in the function of --data.preprocess"
                )
            if depth.name != EIGHT.name:
                return Image.fromarray(self.depth.fractions(image))
            if image.mode == self.mode:
                return image
            if self.channels == 1 and _has_colours(image):
                raise UsageError(
                    f"{called}: a colour image (Pillow's mode {image.mode}); the set is grayscale, 1 channel; convert "
                    "the file, or remove it"
                )
            return image.convert(self.mode)


def _tell(omission: str) -> None:
    # The text is the same for every image, so Python shows the warning once.
    warnings.warn(f"image: {omission}", DataWarning, stacklevel=3)


def read_header(stored: bytes | np.ndarray, channels: int, depth: Depth = EIGHT) -> Picture:
    """Reads the header of an encoded image without decoding its pixels, or wraps an array of pixels.

    The depth and the colours of an encoded image are checked only when it is decoded (`Picture.decoded`). A DataWarning
    tells of a rotation in EXIF data, which is not applied, and of frames after the first, which are left out.

    Args:
      stored: an encoded image, or a uint8 array [height, width, channels].
      channels: the number of channels to decode to.
      depth: the depth that an encoded image must have. It does not apply to arrays.

    Raises:
      UsageError: the header is damaged, `channels` is not 1, 3 or 4, or an array is not uint8 [height, width,
        channels].
    """
    if channels not in MODES:
        raise UsageError(f"image: {channels} channels; only 1, 3 or 4 can be resized; write --data.image_size 0")
    if isinstance(stored, bytes):
        with named_errors(stored):
            image = opened(stored)
            return Picture(stored, channels, image.size, lambda: image, depth=depth)
    if stored.dtype != np.uint8 or stored.ndim != 3 or stored.shape[-1] != channels:
        raise UsageError(
            f"image: {stored.dtype} {stored.shape}; only uint8 [height, width, {channels}] can be resized; "
            "write --data.image_size 0 to take images as they are stored"
        )
    image = Image.fromarray(stored[..., 0] if channels == 1 else stored)
    return Picture(stored, channels, image.size, lambda: image)


def read_plain_header(stored: bytes | np.ndarray, channels: int, depth: Depth = EIGHT) -> Picture:
    """Reads a header as `read_header` does; it reads the header of a plain JPEG without Pillow, which is faster.

    Pillow then opens the plain JPEG (`plain_header`) only when it is needed, so that errors in its data are raised
    later.

    Raises:
      UsageError: see `read_header`.
    """
    if not isinstance(stored, bytes) or channels not in MODES or depth.name != EIGHT.name:
        return read_header(stored, channels, depth)
    header = plain_header(stored)
    if header is None or header.width * header.height > (Image.MAX_IMAGE_PIXELS or math.inf):
        return read_header(stored, channels, depth)
    return Picture(stored, channels, (header.width, header.height), functools.partial(opened, stored), header)


def decode(stored: bytes | np.ndarray, channels: int, depth: Depth = EIGHT) -> np.ndarray:
    """Decodes an encoded image at its stored size to `depth.dtype` [H, W, channels]; returns an array unchanged.

    An image of a `depth` other than 8 bits has 1 channel, whatever `channels` is.

    Raises:
      UsageError: see `read_header` and `Picture.decoded`. An array is not checked.
    """
    return pixels(read_header(stored, channels, depth).decoded()) if isinstance(stored, bytes) else stored


def pixels(image: Image.Image) -> np.ndarray:
    """Converts an image of Pillow to an array [H, W, C], also with 1 channel: float32 for mode F, uint8 for 8 bits."""
    values = np.asarray(image)
    return values[..., None] if values.ndim == 2 else values


def _has_colours(image: Image.Image) -> bool:
    """True if at least one pixel is not gray; an RGB image whose channels are equal has no colours."""
    if is_gray(image.mode):
        return False
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
    return not (np.array_equal(red, green) and np.array_equal(green, blue))


def _is_transparent(image: Image.Image) -> bool:
    """True if a pixel of an image is not fully opaque, by its alpha channel or a colour marked as transparent.

    An image of more than 8 bits with a transparent colour counts as transparent without a look at its pixels.
    """
    if "transparency" in image.info:
        if depth_of(image) != EIGHT:
            return True  # Pillow cannot convert it
        image = image.convert("RGBA")
    if image.getbands()[-1] != "A":  # that of LAB is a colour
        return False
    lowest, _ = image.getchannel("A").getextrema()
    return isinstance(lowest, int | float) and lowest < 255


def opened(stored: bytes | str) -> Image.Image:
    """Opens an image, bytes or a path, in one of `FORMATS`, whatever its extension; pixels are not decoded.

    Other formats are refused, because Pillow would start programs for some, such as EPS. A DataWarning tells of what is
    left out: a rotation in EXIF data, and all frames or pages but the first. Errors are Pillow's (`named_errors`).
    """
    image = _open(stored)
    try:
        omissions = list(_left_out(image))
    except Exception:  # damaged EXIF data or a damaged second frame, which is not needed
        return _open(stored)
    for text in omissions:
        # The line of the warning is the same for all callers too, so Python shows it once.
        warnings.warn(f"image: {text}", DataWarning, stacklevel=1)
    return image


def _open(stored: bytes | str) -> Image.Image:
    return Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored, formats=FORMATS)


def _left_out(image: Image.Image) -> Iterator[str]:
    # A TIFF has its orientation elsewhere, and Pillow applies it.
    if "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        yield (
            "some images have an EXIF tag that says how to turn them, and are read as they are stored, not turned; to "
            "turn them, and their masks, write PIL.ImageOps.exif_transpose(PIL.Image.open(path)).save(path, quality=95)"
            " for each file with the tag"
        )
    if image.format in ("TIFF", "GIF", "WEBP", "PNG") and getattr(image, "is_animated", False):
        yield (
            "some files have several frames or pages, of which only the first is read; to read the others, save each "
            "as a file of its own"
        )


@contextlib.contextmanager
def named_errors(stored: object, called: str = "image") -> Iterator[None]:
    """Context manager that converts errors of any type, inside its `with` block, to a UsageError that names the image.

    Pillow raises many types for a damaged image: SyntaxError, struct.error and others. UsageError, warnings and
    errors of an exhausted machine pass unchanged.

    Args:
      stored: the path of the image or its bytes, which have a `path` if they were read from a file.
      called: the name in the message of an image without a path.

    Raises:
      UsageError: the image cannot be decoded; the message has its path, the reason and advice.
    """
    try:
        yield
    except (UsageError, Warning):
        raise
    except Exception as error:
        if is_exhausted(error):
            raise
        path = stored if isinstance(stored, str) else name_of(stored)
        advice = "repair or remove the file" if path else "prepare the data set again"
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # Pillow's message names only the buffer that holds the image
            reason = (
                f"not an image in one of the formats {', '.join(FORMATS)}, or of numbers that Pillow does not read, "
                "such as a TIFF of 16- or 64-bit floats (store 32-bit floats)"
            )
        raise UsageError(f"{path or called}: cannot be decoded: {reason}; {advice}") from error
