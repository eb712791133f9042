"""Which files a plot can be written to."""

import pathlib

from mpjax.config.paths import expanded
from mpjax.errors import UsageError


ENDINGS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")
"""Of those that Matplotlib writes."""


def check_image(flag: str, path: str) -> None:
    """Raises UsageError for a path that no plot can be written to; an empty one is none."""
    ending = pathlib.PurePath(path).suffix
    if path and ending.lower().removeprefix(".") not in ENDINGS:
        raise UsageError(f"{flag} {path} ends in '{ending}': wanted .{', .'.join(ENDINGS)}")
    folder = expanded(path).parent
    if path and not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}")
