"""Reads stored examples as checked arrays of one shape, for batches in memory and streamed ones."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.beside_images import require_one_frame
from mpjax.data.examples import Example, Examples, Source, array, conform
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

_CHUNK = 512
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
        return {name: aligned((count, *map(int, field.shape)), np.dtype(np.uint8)) for name, field in images.items()}

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
                plan[name] = functools.partial(resized, nearest, picture, int(field.shape[0] or 0), box)
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


def read_batch(
    examples: Examples,
    indices: Sequence[int] | np.ndarray,
    read: Reader,
    drawn: np.ndarray | None = None,
) -> Arrays:
    """Reads the examples at `indices` as one batch; `drawn` has what a random frame of each draws.

    Raises:
      UsageError: an example does not match its fields or the dtypes of the first example; the message names it.
    """
    # Fetching records one by one costs fifteen times as much.
    numbers = [int(index) for index in indices]
    found = examples.__getitems__(numbers)

    def each(function: Callable[..., Any], *arguments: Iterable) -> list:
        done = []
        for number, *its in zip(numbers, *arguments, strict=True):
            try:
                done.append(function(*its))
            except UsageError as error:
                raise UsageError(f"{error} (example {number} of {read.name})") from error
        return done

    # One kind of work for all examples, then the next: after a decoder has run, Python's own code and data are no
    # longer in the processor's caches, and costs four times as much.
    memory = read.memory(len(found))  # of the batch: images are resized into it, without a copy
    rows = [{name: images[row] for name, images in memory.items()} for row in range(len(found))]
    plans = each(read.planned, found, draws(np.random.default_rng(0), len(found)) if drawn is None else drawn, rows)
    settled = each(read.settled, found, each(decoded, plans))
    for number, example in zip(numbers, settled, strict=True):
        require_dtypes(example, settled[0], number, read)
    return {
        name: memory[name] if name in memory else stacked([example[name] for example in settled]) for name in settled[0]
    }


_ALIGNMENT = 64
"""The bytes at whose multiples an array has to begin for JAX to use it on a CPU without a copy."""


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an array that begins at a multiple of `_ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays of one shape and dtype; the result begins at a multiple of `_ALIGNMENT`."""
    return np.stack(rows, out=aligned((len(rows), *rows[0].shape), rows[0].dtype))


def require_dtypes(example: Arrays, first: Arrays, number: int, read: Reader) -> None:
    """Raises UsageError if dtypes differ from the first example: uint8 is scaled on the device, float32 is not.

    Raises:
      UsageError: a dtype differs; the message names the example.
    """
    for name, value in example.items():
        if value.dtype != first[name].dtype:
            raise UsageError(
                f"{name}: example {number} of {read.name} is {value.dtype}, others are {first[name].dtype}; wanted one "
                f"dtype; write {name}.astype(np.float32) / 255 for all, or astype(np.uint8) for all"
            )


class Split(Protocol):
    """Examples that are read by their numbers."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    @property
    def first(self) -> Arrays:
        """Returns the first example, as a batch of one."""
        ...

    def batch(self, indices: Sequence[int] | np.ndarray, drawn: np.ndarray | None = None) -> Arrays:
        """Reads examples as one batch, as `read_batch` does, in the dtypes of the first example."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class SplitOfOne:
    """The `Split` of one data set."""

    examples: Examples
    read: Reader

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def first(self) -> Arrays:
        """Returns the first example, as a batch of one."""
        return self._first

    @functools.cached_property
    def _first(self) -> Arrays:
        return read_batch(self.examples, [0], self.read)

    def batch(self, indices: Sequence[int] | np.ndarray, drawn: np.ndarray | None = None) -> Arrays:
        """Reads examples as one batch, in the dtypes of the first example."""
        found = read_batch(self.examples, indices, self.read, drawn)
        require_dtypes(found, self.first, int(indices[0]), self.read)
        return found


def read_all(split: Split, workers: int) -> Arrays:
    """Reads a whole split into memory, each field as [N, ...].

    Raises:
      UsageError: see `read_batch`.
    """
    whole = {name: np.empty((len(split), *value.shape[1:]), value.dtype) for name, value in split.first.items()}

    def fill(start: int) -> None:
        part = slice(start, min(start + _CHUNK, len(split)))
        for name, value in split.batch(range(part.start, part.stop)).items():
            whole[name][part] = value

    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        list(pool.map(fill, range(0, len(split), _CHUNK)))
    return whole


def fits_in_memory(source: Source, config: Data, read: Reader) -> bool:
    """Returns True if all decoded splits fit in memory; False if sizes vary, because each epoch crops images anew."""
    if any(part.varies for part in source.trained_on):
        return False
    example = sum(value.nbytes for value in read(source.train[0]).values())
    count = sum(len(part.train) for part in source.trained_on) + len(source.test)
    return count * example <= config.in_memory_mb * 1e6
