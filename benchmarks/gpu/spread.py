"""Repeated measurements as a median and quartiles."""

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict:
    """`median`, `quartiles` and the number of `repeats`."""
    if len(values) < 2:
        return {"median": values[0], "quartiles": [values[0], values[0]], "repeats": len(values)}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high], "repeats": len(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict:
    """The spread of the ratios of measurements that were taken next to each other; the median is of medians."""
    paired = [a / b for a, b in zip(above, below, strict=False)]
    count = len(paired)
    return {**spread(paired), "median": statistics.median(above[:count]) / statistics.median(below[:count])}
