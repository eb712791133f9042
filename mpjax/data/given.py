"""Batches a user's inputs to a trained model, and reads image files or the examples of a split as such inputs."""

import concurrent.futures
import dataclasses
import functools
import glob
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PILImage

from mpjax.config.paths import expanded
from mpjax.config.schema import Data
from mpjax.data.example_reader import Reader, reader, trained_dtypes
from mpjax.data.examples import Source
from mpjax.data.fields import Image, Mask
from mpjax.data.images.decoding import FileBytes, named_errors, opened
from mpjax.data.images.depth import is_gray
from mpjax.data.sources.metadata import NAMES
from mpjax.data.stacking import Arrays
from mpjax.data.stream import Batch, padded_batch
from mpjax.errors import UsageError, is_exhausted


class Square(NamedTuple):
    """A square crop of an image, in pixels; `right` and `bottom` are exclusive."""

    left: int
    top: int
    right: int
    bottom: int


def squares_of(width: int, height: int) -> list[Square]:
    """Covers an image with the fewest squares that have its shorter side, evenly spaced along its longer side.

    They may overlap, and are ordered from left to right or from top to bottom. A square image has one.

    >>> [square.left for square in squares_of(5, 2)]
    [0, 2, 3]
    """
    side, longer = min(width, height), max(width, height)
    starts = np.round(np.linspace(0, longer - side, -(-longer // side))).astype(int).tolist()
    if width >= height:
        return [Square(start, 0, start + side, side) for start in starts]
    return [Square(0, start, side, start + side) for start in starts]


def joined(masks: Sequence[np.ndarray], width: int, height: int) -> np.ndarray:
    """Joins the masks of the squares `squares_of(width, height)`, in their order, into one mask [height, width].

    Each mask [h, w] may have any size: it is resized to its square by nearest neighbour, so class numbers are never
    averaged. A pixel in two squares takes its class from the square with the nearer centre.
    """
    squares = squares_of(width, height)
    whole = np.empty((height, width), masks[0].dtype)
    for number, (square, mask) in enumerate(zip(squares, masks, strict=True)):
        side = square.right - square.left
        stretched = np.asarray(PILImage.fromarray(mask).resize((side, side), PILImage.Resampling.NEAREST))
        # The square before keeps its half of the overlap: squares are ordered along the longer side.
        before = squares[number - 1] if number else square
        left = (square.left + before.right) // 2 if before.left < square.left else square.left
        top = (square.top + before.bottom) // 2 if before.top < square.top else square.top
        whole[top : square.bottom, left : square.right] = stretched[top - square.top :, left - square.left :]
    return whole


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A user's inputs to a trained model: their names, and the functions that load them and turn them into arrays.

    Args:
      names: the name of each input, for the result and for messages.
      load: a function from the positions of inputs, counted from 0, to the stored inputs.
      to_arrays: a function from a stored input to the model's inputs that are made of it, as arrays [n, ...] by field.
        n is above 1 for a long text cut into blocks and for an image cut into squares (`squares_of`), else 1. It raises
        UsageError if the input cannot be read.
      mask: a function from a stored input and the predicted masks of its n rows to one mask of the image's size. None:
        the model predicts no masks.
      trained: the dtype that each field had in training. A field that is missing here must have the dtype that it has
        in the first input.
    """

    names: Sequence[str]
    load: Callable[[Sequence[int]], Sequence[Any]]
    to_arrays: Callable[[Any], Arrays]
    mask: Callable[[Any, Sequence[np.ndarray]], np.ndarray] | None = None
    trained: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)


class GivenBatch(NamedTuple):
    """A batch of a user's inputs, padded with zeros to the full batch size.

    Attributes:
      owners: for each row of the batch that is not padding, the position of its input in `Inputs`, int.
      arrays: the fields, [B, ...], and `weight`, float32 [B]: 1 for a row of an input, 0 for padding.
    """

    owners: np.ndarray
    arrays: Batch


def given_batches(
    inputs: Inputs, batch_size: int, *, workers: int, skip: Callable[[str], None] | None
) -> Iterator[GivenBatch]:
    """Yields the rows of all inputs in order, in batches of one size; the last is padded.

    The rows of one input may be spread over several batches.

    Args:
      inputs: the inputs.
      batch_size: the number of rows of a batch.
      workers: the number of threads that read inputs, at least 1.
      skip: a function that receives the message about an unreadable input, which is then left out. None: an unreadable
        input is an error. If no input can be read, nothing is yielded.

    Raises:
      UsageError: an input cannot be read, and `skip` is None; or, whatever `skip`, an input has another dtype than in
        training or than the first input. The message names the input.
      OSError: file descriptors ran out.
    """
    first: Arrays = {}
    waiting: list[tuple[int, Arrays]] = []  # the position of an input, and one of its rows

    def attempt(read: Callable[[Any], Any], of: Any) -> Any | UsageError:
        if isinstance(of, UsageError):
            return of
        try:
            return read(of)
        except UsageError as error:
            return error
        except OSError as error:
            if is_exhausted(error):
                raise
            return UsageError(f"cannot be read: {error}; repair or remove the file")

    def load(positions: Sequence[int]) -> Sequence[Any]:
        """Loads inputs together or, if that fails, one at a time; an unreadable one becomes its UsageError."""
        stored = attempt(inputs.load, positions)
        if not isinstance(stored, UsageError):
            return stored
        return [attempt(lambda position: inputs.load([position])[0], position) for position in positions]

    rows_of = functools.partial(attempt, inputs.to_arrays)
    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        for start in range(0, len(inputs.names), batch_size):
            positions = range(start, min(start + batch_size, len(inputs.names)))
            for position, arrays in zip(positions, pool.map(rows_of, load(positions)), strict=True):
                if isinstance(arrays, UsageError):
                    name, message = inputs.names[position], str(arrays)
                    message = message if name in message else f"{name}: {message}"
                    if skip is None:
                        raise UsageError(message) from arrays
                    skip(message)
                    continue
                for field, dtype in inputs.trained.items():
                    if field in arrays and arrays[field].dtype != dtype:
                        raise UsageError(
                            f"{inputs.names[position]}: {field} is {arrays[field].dtype}, that of the training set is "
                            f"{dtype}: images of 8 bits are divided by 255, and floats are not; add these images to "
                            f"the data set as a split, stored as {dtype}, and write --split NAME"
                        )
                first = first or arrays
                _require_dtypes(arrays, first, inputs.names[position])
                count = len(next(iter(arrays.values())))
                waiting += [(position, {name: value[i] for name, value in arrays.items()}) for i in range(count)]
            while len(waiting) >= batch_size:
                yield _joined(waiting[:batch_size], batch_size)
                waiting = waiting[batch_size:]
    if waiting:
        yield _joined(waiting, batch_size)


def _require_dtypes(arrays: Arrays, first: Arrays, name: str) -> None:
    for field, value in arrays.items():
        if value.dtype != (dtype := first[field].dtype):
            raise UsageError(f"{name}: {field} is {value.dtype}, that of the first input is {dtype}; wanted one dtype")


def _joined(rows: Sequence[tuple[int, Arrays]], batch_size: int) -> GivenBatch:
    arrays = {name: np.stack([row[name] for _, row in rows]) for name in rows[0][1]}
    return GivenBatch(np.asarray([owner for owner, _ in rows]), padded_batch(arrays, batch_size))


def given_split(source: Source, config: Data) -> Inputs:
    """Builds `Inputs` of the examples of the test split, read as for evaluation.

    They are named `SPLIT[0]` and so on, or by their files or places in a file (`Source.places`).

    If the set has masks, only the images are read. If `config` also resizes images, each is cut into squares
    (`squares_of`), so that the whole image gets a mask.

    Raises:
      UsageError: see `reader`.
    """
    numbered = [f"{config.test_split}[{index}]" for index in range(len(source.test))]
    names = source.places or numbered
    if isinstance(source.fields.get("mask"), Mask):
        if len({pathlib.PurePath(name).stem for name in names}) < len(names):  # their masks would be one file
            names = numbered

        def images(positions: Sequence[int]) -> list[Any]:
            return [example["image"] for example in source.test.__getitems__(list(positions))]

        return _to_segment(names, images, source, config)
    read = reader(source, config, training=False)

    def to_arrays(example: Any) -> Arrays:
        return read.batch([example])

    return Inputs(
        names,
        lambda positions: source.test.__getitems__(list(positions)),
        to_arrays,
        trained=trained_dtypes(source, config),
    )


def given_images(inputs: Sequence[str], source: Source, config: Data) -> Inputs:
    """Builds `Inputs` of image files, which are read as the images of the set are for evaluation.

    If the set has masks and `config` resizes images, each image is cut into squares (`squares_of`).

    Args:
      inputs: paths of files, folders and globs; see `files_of`.
      source: the set that the model was trained on.
      config: the settings of the set.

    Raises:
      UsageError: a file does not exist, a folder has no files, a glob matches none, or `reader` raises. When an image
        is read: it cannot be decoded, or has colours and the model takes grayscale.
    """
    image: Any = source.fields["image"]

    def stored_in(path: str) -> FileBytes:
        stored = FileBytes.read(path)
        if image.shape[2] == 1:
            with named_errors(stored), opened(stored) as picture:
                mode = picture.mode
            if not is_gray(mode):
                raise UsageError(
                    f"{path}: a colour image (Pillow's mode {mode}); the model takes grayscale, 1 channel; convert it"
                )
        return stored

    def load(positions: Sequence[int]) -> list[str]:
        return [paths[position] for position in positions]

    paths = [path for pattern in inputs for path in files_of(pattern)]
    if isinstance(source.fields.get("mask"), Mask):
        return _to_segment(paths, load, source, config, stored_in)
    read = _of_images(source, config)
    return Inputs(
        paths, load, lambda path: read.batch([{"image": stored_in(path)}]), trained=trained_dtypes(source, config)
    )


def _of_images(source: Source, config: Data) -> Reader:
    return reader(dataclasses.replace(source, fields={"image": source.fields["image"]}), config, training=False)


def _to_segment(
    names: Sequence[str],
    load: Callable[[Sequence[int]], Sequence[Any]],
    source: Source,
    config: Data,
    stored_in: Callable[[Any], Any] = lambda image: image,
) -> Inputs:
    """Builds `Inputs` of images to segment, with a function that joins the predicted masks of each image.

    If `config` resizes images, each image is cut into squares (`squares_of`), and each square is one row of a batch;
    otherwise an image is one row.

    Args:
      names: the name of each image.
      load: a function from positions to loaded inputs.
      source: the set that the model was trained on.
      config: the settings of the set.
      stored_in: a function from a loaded input to an encoded image or an array of pixels.
    """
    read = _of_images(source, config)

    def to_arrays(image: Any) -> Arrays:
        stored = stored_in(image)
        if read.frame is None:
            return read.batch([{"image": stored}])
        batches = [
            read.cropped_to(square).batch([{"image": stored}]) for square in squares_of(*read.size("image", stored))
        ]
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def mask(image: Any, masks: Sequence[np.ndarray]) -> np.ndarray:
        return joined(masks, *read.size("image", stored_in(image))) if read.frame else masks[0]

    return Inputs(names, load, to_arrays, mask, trained_dtypes(source, config))


def files_of(pattern: str) -> list[str]:
    """Lists the file at a path, all files below a folder, or the files that match a glob, sorted by name.

    In a folder, its own files come before the files of its subfolders; hidden files and folders are left out, and
    tables of a folder's texts (`metadata.csv` or `.jsonl`). Files are listed whatever their type. `~` stands for the
    user's home folder, and `**` in a glob matches subfolders.

    Raises:
      UsageError: the path does not exist, the folder has no file, or the glob matches none.
    """
    path = expanded(pattern)
    if path.is_dir():
        paths = []
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            paths += [os.path.join(folder, name) for name in sorted(names) if name[0] != "." and name not in NAMES]
        if not paths:
            raise UsageError(f"{pattern}: the folder has no files; wanted images")
        return paths
    if path.exists():
        return [str(path)]
    if matching := [name for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]:
        return matching
    kind = "no file matches" if glob.has_magic(pattern) else "no such file or folder"
    raise UsageError(f"{pattern}: {kind}; wanted images, folders of them, or quoted globs such as 'photos/*.jpg'")


def takes_images(source: Source) -> bool:
    """True if a model trained on this set takes images: the set has an `Image` field `image`. False: it takes texts."""
    return isinstance(source.fields.get("image"), Image)
