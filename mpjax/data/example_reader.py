"""Turns stored examples into checked arrays of one shape: decodes, crops and resizes images on the host."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.beside_images import require_one_frame
from mpjax.data.examples import Example, Source, array, require_fields
from mpjax.data.fields import Fields, Image, Mask
from mpjax.data.images.decoding import Picture, decode, read_header, read_plain_header
from mpjax.data.images.depth import EIGHT, Depth
from mpjax.data.images.interpolation import linear, require_packages
from mpjax.data.images.resizing import Box, Frame, Resize, averaged, centre, draws, nearest, random_part, whole_pixels
from mpjax.data.stacking import Arrays, Numbered, aligned, conform_all
from mpjax.errors import UsageError


_EVALUATED_FRACTION = 224 / 256


@dataclasses.dataclass(frozen=True)
class Reader:
    """Decodes, crops, resizes and checks stored examples.

    Args:
      fields: the fields of the result; images and masks have one size.
      frame: a function that chooses the crop of each image and its mask, which is then resized to the size in `fields`.
        None: no cropping or resizing.
      name: the name of the examples in error messages.
      resize: the function that resizes the crop of an image. Masks are always resized by nearest neighbour.
      header: the function that reads the header of an encoded image or mask, without decoding its pixels.
    """

    fields: Fields
    frame: Frame | None
    name: str = "the data set"
    resize: Resize = averaged
    header: Callable[[bytes | np.ndarray, int, Depth], Picture] = read_header

    def __call__(self, example: Example) -> Arrays:
        """Reads one example in the batch dtypes, without a batch axis.

        A random crop is not random here: it is drawn from a fixed seed at every call. Raises as `batch`.
        """
        return {name: values[0] for name, values in self.batch([example]).items()}

    def batch(
        self, examples: Sequence[Example], drawn: np.ndarray | None = None, numbers: Sequence[int] | None = None
    ) -> Arrays:
        """Reads several examples as one array [N, ...] per field, in the batch dtypes.

        Columns of the examples that are not in `fields` are dropped.

        Args:
          examples: the examples as stored.
          drawn: the random numbers of the crops, as `draws` returns them, [N, ...]. None: numbers from a fixed seed,
            the same for all batches of this size.
          numbers: the number of each example, for error messages. None: errors name no example.

        Raises:
          UsageError: an example lacks a field or does not match it, an image cannot be decoded, or an example differs
            in dtype from the first of `examples`.
        """
        numbered = Numbered(self.name, numbers)
        numbered.map(functools.partial(require_fields, fields=self.fields), examples)
        columns: dict[str, list | np.ndarray] = {name: [example[name] for example in examples] for name in self.fields}
        if self.frame:
            drawn = draws(np.random.default_rng(0), len(examples)) if drawn is None else drawn
            columns |= self._cropped(columns, self.frame, drawn, numbered)
        else:
            for name, field in self.fields.items():
                if isinstance(field, Image | Mask):
                    columns[name] = numbered.map(functools.partial(_decoded, name, field), columns[name])
        return conform_all(columns, self.fields, numbered)

    def size(self, name: str, value: Any) -> tuple[int, int]:
        """Reads the width and height in pixels, in this order, of `value`, a stored image of the field `name`.

        Pixels are not decoded, and a rotation in EXIF data is not applied: a DataWarning tells of it, and of frames
        after the first. Raises UsageError if the header is damaged, if an array is not uint8 [H, W, C], or if the field
        has another number of channels than 1, 3 or 4.
        """
        return self._opened(name, cast(Image, self.fields[name]), value).stored_size

    def cropped_to(self, box: Box) -> "Reader":
        """Builds a copy of this reader that crops every image to `box`, in pixels, before it resizes it."""
        return dataclasses.replace(self, frame=lambda width, height, drawn: box)

    def _cropped(self, columns: Mapping[str, Any], frame: Frame, drawn: np.ndarray, named: Numbered) -> Arrays:
        """Crops and resizes images to [N, side, side, channels], and masks to uint8 [N, side, side].

        Only images and masks are returned. The crops are chosen by the sizes of the first of these fields, and are used
        for the others too. Headers of all examples are read first, then all crops are chosen, then all pixels are
        decoded. A decoder evicts Python's own code and data from the processor's caches, so alternating takes four
        times as long.
        """

        def box(picture: Picture, row: np.ndarray) -> Box:
            return frame(*picture.stored_size, row)

        boxes, first, sizes, cropped = [], "", [], {}
        for name, field in self.fields.items():
            if not isinstance(field, Image | Mask):
                continue
            pictures = named.map(functools.partial(self._opened, name, field), columns[name])
            if not boxes:
                first, sizes = name, [picture.stored_size for picture in pictures]
                boxes = named.map(box, pictures, drawn)
            else:
                named.map(functools.partial(_require_size, name, first), pictures, sizes)
            side = cast(int, field.shape[0])
            crops = aligned((len(pictures), side, side, _channels(field)), _depth(field).dtype)
            named.map(nearest if isinstance(field, Mask) else self.resize, pictures, boxes, crops)
            cropped[name] = crops[..., 0] if isinstance(field, Mask) else crops
        return cropped

    def _opened(self, name: str, field: Image | Mask, value: Any) -> Picture:
        """Reads the header of an encoded image or mask without decoding pixels; wraps an array, also a mask [H, W]."""
        if not isinstance(value, bytes):
            value = array(name, value)
            if isinstance(field, Mask) and value.ndim == 2:
                value = value[..., None]
        return self.header(value, _channels(field), _depth(field))


def _require_size(name: str, first: str, picture: Picture, size: tuple[int, int]) -> None:
    if picture.stored_size != size:
        (width, height), (first_width, first_height) = picture.stored_size, size
        raise UsageError(
            f"{name} has {width}x{height} pixels and {first} {first_width}x{first_height}: both get one crop, so store "
            "them in one size; masks resized by nearest neighbour keep their class numbers"
        )


def _decoded(name: str, field: Image | Mask, value: Any) -> np.ndarray:
    """Decodes an encoded image or mask at its stored size, and keeps the pixels of an array unchanged.

    The last axis of a mask [H, W, 1] is removed.
    """
    encoded = isinstance(value, bytes)
    pixels = decode(value, _channels(field), _depth(field)) if encoded else array(name, value, field)
    return pixels[..., 0] if isinstance(field, Mask) and pixels.shape[2:] == (1,) else pixels


def _channels(field: Image | Mask) -> int:
    return field.shape[2] if isinstance(field, Image) else 1


def _depth(field: Image | Mask) -> Depth:
    return field.depth if isinstance(field, Image) else EIGHT


def reader(source: Source, config: Data, *, training: bool) -> Reader:
    """Builds the reader that turns the examples of `source` into arrays of one shape.

    If `config.image_size` is set and there are images, images and masks are cropped and resized to squares of that
    side. If all images have one size, the crop is the largest centred square. If sizes vary, training crops a random
    rectangle (`random_part`), and evaluation a centred square of 7/8 of the shorter side. Crops are resized with
    antialiasing (`averaged`). Without `config.antialias`, they are rounded to whole pixels and resized by `linear`. If
    `config.image_size` is 0, images keep their stored size.

    Args:
      source: the data set.
      config: `image_size` and `antialias`; the names of the splits, for messages.
      training: whether the reader is for training, which decides the crop if sizes vary.

    Raises:
      UsageError: sizes vary and `config.image_size` is not set, images would be cropped and another field of two or
        more axes would not, or a package that `config` needs is not installed.
    """
    split = config.train_split if training else config.test_split
    split_name = f"split '{split}' of '{source.name}'"
    size = config.image_size
    if size and any(isinstance(field, Image) for field in source.fields.values()):
        require_one_frame(source.fields, size)
        frame = centre()
        if source.varies:
            frame = random_part if training else centre(_EVALUATED_FRACTION)
        fields = {name: _resized(field, size) for name, field in source.fields.items()}
        if config.antialias:
            return Reader(fields, frame, split_name)
        require_packages()
        # Whole pixels give an image and its mask the same crop.
        return Reader(fields, whole_pixels(frame), split_name, linear, read_plain_header)
    for name, field in source.fields.items():
        if isinstance(field, Image) and None in field.shape:
            raise UsageError(
                f"{name}: '{source.name}' has images of several sizes, {field.shape}; a batch needs one size; "
                "write --data.image_size 224",
                repair={"data.image_size": 224},
            )
    return Reader(source.fields, None, split_name)


def _resized(field: Any, size: int) -> Any:
    if isinstance(field, Image):
        return dataclasses.replace(field, shape=(size, size, field.shape[2]))
    return dataclasses.replace(field, shape=(size, size)) if isinstance(field, Mask) else field


def batch_fields(source: Source, config: Data) -> Fields:
    """Describes the fields of a batch: the fields of `source`, with the size that images have after reading.

    If `config.image_size` is set and there are images, images and masks are squares of that side; otherwise the shapes
    stay as stored. Raises as `reader`.
    """
    return reader(source, config, training=True).fields


def trained_dtypes(source: Source, config: Data) -> Mapping[str, np.dtype]:
    """Finds the dtype of each image field that a model was trained on, by reading the first training examples.

    Images of floats from 0 to 1 are left out: uint8 images may take their place, because they are scaled to that range
    too. The result is empty if the set has no images; without training examples, it is `source.trained_dtypes`.
    """
    images = [name for name, field in source.fields.items() if isinstance(field, Image)]
    if not images or not len(source.train):
        return source.trained_dtypes
    read = reader(source, config, training=False)
    first = [read(source.train[number]) for number in range(min(len(source.train), _LOOKED_AT))]
    return {
        name: first[0][name].dtype
        for name in images
        if first[0][name].dtype.kind != "f" or not all(_is_scaled(example[name]) for example in first)
    }


_LOOKED_AT = 16  # one alone may be black, whatever its range


def _is_scaled(values: np.ndarray) -> bool:
    return bool(values.min() >= 0 and values.max() <= 1)
