"""Settings of a comparison of runs, and how they are read."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from mpjax.config.images import check_image
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Where do the curves of runs part? Runs that differ only in the seed count as one group, whose spread is the
    band; the group of the first run is what the others are compared with."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN RUN ...")]
    """Folders of the runs, two or more."""
    seeds: tuple[int, ...] = ()
    """Seeds to compare, of each group; none: all."""
    metrics: tuple[str, ...] = ("train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm")
    """What to compare, as metrics.jsonl names it."""
    band: Literal["range", "std"] = "range"
    """Band of a group: from the lowest to the highest seed, or two standard deviations about their mean."""
    tolerance: float = 0.05
    """Where both groups have one seed each: relative difference that counts as none."""
    smoothing: int = 5
    """Reports of training over which its curves are averaged before they are compared; 1: none."""
    plot: str = "comparison.png"
    """Image of the curves; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""


def check(settings: Comparison) -> None:
    """Raises UsageError where settings make no comparison."""
    if len(settings.runs) < 2:
        raise UsageError(f"{len(settings.runs)} run(s) to compare: wanted the folders of two or more")
    if not settings.metrics:
        raise UsageError("--metrics is empty: wanted one or more, such as train/loss")
    if settings.smoothing < 1:
        raise UsageError(f"--smoothing is {settings.smoothing}: wanted 1 or more reports")
    if not 0 <= settings.tolerance < math.inf:
        raise UsageError(f"--tolerance is {settings.tolerance}: wanted 0 or more")
    check_image("--plot", settings.plot)


def load_comparison(argv: Sequence[str], *, prog: str) -> Comparison:
    """The settings of a command line.

    Raises:
      UsageError: as `check`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings = tyro.cli(Comparison, args=list(argv), prog=prog, use_underscores=True)
    check(settings)
    return settings
