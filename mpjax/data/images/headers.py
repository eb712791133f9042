"""Finds the size, channels and depth of the images of a set, from the headers of a sample."""

from collections.abc import Callable

import numpy as np

from mpjax.data.fields import Image
from mpjax.data.images.decoding import named_errors, opened, require_regular
from mpjax.data.images.depth import EIGHT, depth_of, is_gray
from mpjax.errors import UsageError


SAMPLE = 1000
"""The largest number of images whose headers are read."""


def stored_image(count: int, open_at: Callable[[int], bytes | str], called: str) -> Image:
    """Builds the image field of a set, from the headers of up to `SAMPLE` evenly spaced images.

    Reading the headers of a million files would take minutes. An image outside the sample is an error when it is read
    if its depth differs, if it has colours and the sample has none, or if its size differs and images are not resized.

    Args:
      count: the number of images in the set.
      open_at: a function from an index to the image's bytes or its path; only the header of a file is read.
      called: the name of the images in error messages.

    Returns:
      The field. H and W are both None if the sizes of the sampled images differ, or if `count` is 0. C is 1 if all
      sampled images are grayscale, else 3.

    Raises:
      UsageError: the header of a sampled image is damaged, a path is not a regular file, or two images differ in depth.
    """
    chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    sizes: set[tuple[int, int]] = set()
    gray, first, others = True, None, ""
    for index in chosen:
        stored = open_at(int(index))
        if isinstance(stored, str):
            require_regular(stored)
        with named_errors(stored, called), opened(stored) as picture:
            sizes.add(picture.size)
            gray = gray and is_gray(picture.mode)
            depth = depth_of(picture)
        if first is None:
            first, others = depth, f"{stored} is" if isinstance(stored, str) else "others are"
        if depth != first:
            raise UsageError(
                f"{stored if isinstance(stored, str) else called}: {depth.name}, but {others} {first.name}, which is "
                "read in another range; wanted one kind in a set: convert the files"
            )
    width, height = sizes.pop() if len(sizes) == 1 else (None, None)
    return Image((height, width, 1 if gray else 3), depth=first or EIGHT)
