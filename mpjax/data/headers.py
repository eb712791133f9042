"""What the headers of encoded images say of a whole set: its size, if it has one, and its channels."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpjax.data.images import decoding, opened, require_regular
from mpjax.errors import UsageError


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
