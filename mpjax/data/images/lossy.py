"""Finds masks whose class numbers a lossy format has changed."""

import itertools
from collections.abc import Mapping

from mpjax.data.examples import Examples
from mpjax.data.images.decoding import name_of


_LOOKED_AT = 16
_LEVEL = 0.05
"""The share of the pixels from which on a value is one that was meant."""


def compression_noise(counts: Mapping[int, int], stored: Examples | None, looked_at: str) -> str:
    """Returns what a lossy format did to masks, with what to do instead, or an empty string.

    A JPEG of class numbers decodes to values beside them, which nearly always are one or two apart.

    Args:
      counts: how often each value occurs in the decoded masks; none that is ignored.
      stored: the examples before their `mask` is decoded; None: the values are not those of the files.
      looked_at: where the values were counted.
    """
    seen = sorted(counts)
    near = any(above - below <= 2 for below, above in itertools.pairwise(seen))
    if not near or stored is None or (name := _first_jpeg(stored)) is None:
        return ""
    levels = _levels(counts)
    around = f", most of them near {', '.join(map(str, levels))}" if levels else ""
    shown = ", ".join(map(str, seen[:8])) + (f" and {len(seen) - 8} more" if len(seen) > 8 else "")
    return (
        f"mask: {name or 'masks'}: a JPEG, whose compression changes class numbers: the stored values {looked_at} are "
        f"{shown}{around}; write the masks as PNG from their source, or round each value to the one that was meant, in "
        "a function for --data.preprocess"
    )


def _levels(counts: Mapping[int, int]) -> list[int]:
    """Returns the frequent values, and of those close together the most frequent one."""
    levels: list[int] = []
    for value in sorted(value for value, count in counts.items() if count >= _LEVEL * sum(counts.values())):
        if levels and value - levels[-1] <= 2:
            levels[-1] = max(levels[-1], value, key=counts.__getitem__)
        else:
            levels.append(value)
    return levels


def _first_jpeg(stored: Examples) -> str | None:
    """Returns the name of a mask that is a JPEG, empty if it has none, or None if no mask is one."""
    for index in range(0, len(stored), max(1, len(stored) // _LOOKED_AT)):
        mask = stored[index].get("mask")
        if isinstance(mask, bytes) and mask.startswith(b"\xff\xd8"):
            return name_of(mask)
    return None
