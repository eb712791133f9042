"""From stored examples to checked arrays of one shape: the step that every stream takes, in memory or not."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import numpy as np

from mpjax.config.schema import Data
from mpjax.data.contract import conform
from mpjax.data.examples import Example, Examples, Source
from mpjax.data.images import Frame, centre, decode, random_part, resize
from mpjax.errors import UsageError


_CHUNK = 512
_EVALUATED_SHARE = 224 / 256


@dataclasses.dataclass(frozen=True)
class Reader:
    """Decodes, resizes and checks single examples.

    Args:
      num_classes: labels are in [0, num_classes).
      shape: (H, W, C) of the images that come out.
      frame: the part of each image that is resized to `shape`; None: images are taken as they are stored.
    """

    num_classes: int
    shape: tuple[int, int, int]
    frame: Frame | None

    def __call__(self, example: Example, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """`image`, [H, W, C] uint8 or float32, and `label`, int32; `rng` is what a random frame draws from."""
        channels = self.shape[-1]
        if self.frame is None:
            image = decode(example["image"], channels)
        else:
            image = resize(example["image"], channels, self.shape[0], self.frame, rng or np.random.default_rng(0))
        return conform({"image": image, "label": example["label"]}, self.num_classes, self.shape)


def reader(source: Source, config: Data, *, training: bool) -> Reader:
    """How the examples of `source` become arrays of one shape.

    Images of one size are resized whole, by the shorter side. Where sizes vary, training takes a random part of each
    image, and evaluation the middle of it.

    Raises:
      UsageError: sizes vary and `config.image_size` does not say which one is wanted.
    """
    height, width, channels = source.image_shape
    size = config.image_size
    if size:
        frame = centre()
        if source.varies:
            frame = random_part if training else centre(_EVALUATED_SHARE)
        return Reader(source.num_classes, (size, size, channels), frame)
    if height is None or width is None:
        raise UsageError(
            f"image: '{source.name}' has images of several sizes, {source.image_shape}; a batch needs one; "
            "write --data.image_size 224"
        )
    return Reader(source.num_classes, (height, width, channels), None)


def image_shape(source: Source, config: Data) -> tuple[int, int, int]:
    """(H, W, C) of the images in a batch."""
    return reader(source, config, training=True).shape


def read_batch(
    examples: Examples, indices: Sequence[int], read: Reader, rng: np.random.Generator | None = None
) -> dict[str, np.ndarray]:
    """The examples at `indices` as one batch; random frames draw from `rng` one after the other."""
    # All at once: fetching records one by one costs fifteen times as much.
    settled = [read(example, rng) for example in examples.__getitems__([int(index) for index in indices])]
    return {field: np.stack([example[field] for example in settled]) for field in settled[0]}


def read_all(examples: Examples, read: Reader, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole split in memory: images [N, H, W, C] uint8 or float32, and labels [N] int32."""
    first = read_batch(examples, [0], read)["image"]
    images = np.empty((len(examples), *first.shape[1:]), first.dtype)
    labels = np.empty(len(examples), np.int32)

    def fill(start: int) -> None:
        part = slice(start, min(start + _CHUNK, len(examples)))
        batch = read_batch(examples, range(part.start, part.stop), read)
        images[part], labels[part] = batch["image"], batch["label"]

    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        list(pool.map(fill, range(0, len(examples), _CHUNK)))
    return images, labels


def fits_in_memory(source: Source, config: Data, read: Reader) -> bool:
    """Whether both splits are to be held decoded; images that vary in size are not, as each epoch cuts them anew."""
    if source.varies:
        return False
    decoded = (len(source.train) + len(source.test)) * read(source.train[0])["image"].nbytes
    return decoded <= config.in_memory_mb * 1e6
