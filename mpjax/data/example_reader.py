"""Decodes, resizes and checks one example: which part of an image is cut, and where its pixels go."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.beside_images import require_one_frame
from mpjax.data.examples import Example, Source, array, conform
from mpjax.data.fields import Fields, Image, Mask
from mpjax.data.images.decoding import Picture, decode, read_header, read_plain_header
from mpjax.data.images.interpolation import linear, require_packages
from mpjax.data.images.resizing import (
    Box,
    Frame,
    Resize,
    averaged,
    centre,
    draws,
    nearest,
    random_part,
    resized,
    whole_pixels,
)
from mpjax.errors import UsageError


Arrays = dict[str, np.ndarray]
"""Maps each field to an array [N, ...]."""

Plan = dict[str, Callable[[], np.ndarray]]
"""Maps each image and mask of an example to a function that decodes it."""

_EVALUATED_SHARE = 224 / 256


@dataclasses.dataclass(frozen=True)
class Reader:
    """Decodes, resizes and checks single examples.

    Args:
      fields: the fields of the result; images and masks have one size.
      frame: the part of each image and its mask that is resized to the size in `fields`; None: no cropping or resizing.
      name: the name of the examples in error messages.
      resize: resizes that part of an image; that of a mask takes the nearest pixels.
      header: reads the header of an image or a mask.
    """

    fields: Fields
    frame: Frame | None
    name: str = "the data set"
    resize: Resize = averaged
    header: Callable[[bytes | np.ndarray, int], Picture] = read_header

    def __call__(self, example: Example) -> Arrays:
        """Returns the fields in the batch dtypes; a random frame is always the same."""
        drawn = draws(np.random.default_rng(0), 1)[0]
        memory = {name: images[0] for name, images in self.memory(1).items()}
        return self.settled(example, decoded(self.planned(example, drawn, memory)))

    def memory(self, count: int) -> Arrays:
        """Allocates uint8 [count, side, side, channels] for each field of images that are resized."""
        images = {name: field for name, field in self.fields.items() if self.frame and isinstance(field, Image)}
        return {
            name: aligned((count, _side(field), _side(field), field.shape[2]), np.dtype(np.uint8))
            for name, field in images.items()
        }

    def planned(self, example: Example, drawn: np.ndarray, memory: Arrays) -> Plan:
        """Reads the headers of images and masks and chooses their crop; decodes none.

        Args:
          example: as it is stored.
          drawn: what a random frame draws.
          memory: for each image that is resized, uint8 [side, side, channels], where its pixels go.
        """
        plan = {}
        box = None
        for name, field in self.fields.items():
            if name not in example or not isinstance(field, (Image, Mask)):
                continue
            value = _stored(name, example[name], field)
            channels = field.shape[2] if isinstance(field, Image) else 1
            if self.frame is None:
                plan[name] = functools.partial(decode, value, channels)
                continue
            picture = self.header(value, channels)
            box = box or self.frame(*picture.stored_size, drawn)
            if isinstance(field, Image):
                plan[name] = functools.partial(_resized_into, memory[name], self.resize, picture, box)
            else:
                plan[name] = functools.partial(resized, nearest, picture, _side(field), box)
        return plan

    def settled(self, example: Example, images: Arrays) -> Arrays:
        """Returns the fields in the batch dtypes, with decoded images and masks; a mask loses its channel axis."""
        for name, value in images.items():
            if isinstance(self.fields[name], Mask) and value.ndim > 2:
                images = {**images, name: value[..., 0]}
        return conform({**example, **images}, self.fields)


def decoded(plan: Plan) -> Arrays:
    """Decodes the images and masks of one example; a mask is never interpolated."""
    return {name: make() for name, make in plan.items()}


def _side(field: Image | Mask) -> int:
    """Returns the side of images or masks that are resized to a square."""
    return cast(int, field.shape[0])


def _resized_into(out: np.ndarray, resize: Resize, picture: Picture, box: Box) -> np.ndarray:
    resize(picture, box, out)
    return out


def _stored(name: str, value: Any, field: Image | Mask) -> bytes | np.ndarray:
    """Returns a stored image or mask, encoded or as an array; a mask [H, W] becomes [H, W, 1]."""
    if isinstance(value, bytes):
        return value
    pixels = array(name, value)
    return pixels[..., None] if isinstance(field, Mask) and pixels.ndim == 2 else pixels


def reader(source: Source, config: Data, *, training: bool) -> Reader:
    """Returns the reader that turns the examples of `source` into arrays of one shape.

    If `config.image_size` is set, images are cropped and resized to it. If they all have one size, the crop is the
    largest centred square. If sizes vary, training crops a random part and evaluation a smaller centred square.
    Without `config.antialias`, crops are rounded to whole pixels.

    Raises:
      UsageError: sizes vary and `config.image_size` is not set, or images would be cropped and fields beside them not,
        or a package that `config` needs is not installed.
    """
    split = config.train_split if training else config.test_split
    named = f"split '{split}' of '{source.name}'"
    size = config.image_size
    if size and any(isinstance(field, Image) for field in source.fields.values()):
        require_one_frame(source.fields, size)
        frame = centre()
        if source.varies:
            frame = random_part if training else centre(_EVALUATED_SHARE)
        fields = {name: _resized(field, size) for name, field in source.fields.items()}
        if config.antialias:
            return Reader(fields, frame, named)
        require_packages()
        # The mask of an image is cut at the same whole pixels.
        return Reader(fields, whole_pixels(frame), named, linear, read_plain_header)
    for name, field in source.fields.items():
        if isinstance(field, Image) and None in field.shape:
            raise UsageError(
                f"{name}: '{source.name}' has images of several sizes, {field.shape}; a batch needs one size; "
                "write --data.image_size 224",
                repair={"data.image_size": 224},
            )
    return Reader(source.fields, None, named)


def _resized(field: Any, size: int) -> Any:
    if isinstance(field, Image):
        return dataclasses.replace(field, shape=(size, size, field.shape[2]))
    return dataclasses.replace(field, shape=(size, size)) if isinstance(field, Mask) else field


def batch_fields(source: Source, config: Data) -> Fields:
    """Returns the fields of a batch: those of `source`, images and masks in the size that `config` sets."""
    return reader(source, config, training=True).fields


_ALIGNMENT = 64
"""The bytes at whose multiples an array has to begin for JAX to use it on a CPU without a copy."""


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that begins at a multiple of `_ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
