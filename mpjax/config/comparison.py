"""The settings of a comparison of runs, and their parser."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from mpjax.config.commands import check_image, load_settings
from mpjax.config.setting_types import Integers, Texts
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Find where the training curves of runs diverge. Runs that differ only in the seed form a group, and their spread
    is its band. Every group is compared with the group of the first run."""

    runs: Annotated[tyro.conf.Positional[Texts], tyro.conf.arg(metavar="RUN RUN ...")]
    """Folders of two or more runs, or of the runs of `--seeds`."""
    seeds: Integers = ()
    """Seeds of each group to compare; empty: all."""
    metrics: Texts = ("train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm")
    """Metrics to compare, as named in metrics.jsonl."""
    band: Literal["range", "std"] = "range"
    """Band of a group: from the lowest to the highest seed, or two standard deviations around the mean."""
    tolerance: float = 0.05
    """Relative difference up to which two groups of one seed each count as equal."""
    smoothing: int = 5
    """Number of logged values over which training curves (not the loss scale) are averaged; 1: no smoothing."""
    plot: str = "comparison.png"
    """Image file of the curves; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""


def check_comparison(settings: Compare) -> None:
    """Raises UsageError if the settings of a comparison are out of range or incomplete."""
    if not settings.runs:
        raise UsageError("no run to compare: wanted the folders of two or more")
    if not settings.metrics:
        raise UsageError("--metrics is empty: wanted one or more, such as train/loss")
    if settings.smoothing < 1:
        raise UsageError(f"--smoothing is {settings.smoothing}: wanted 1 or more reports")
    if not 0 <= settings.tolerance < math.inf:
        raise UsageError(f"--tolerance is {settings.tolerance}: wanted 0 or more")
    check_image("--plot", settings.plot)


def load_comparison(argv: Sequence[str], *, prog: str) -> Compare:
    """Parses a command line of compare.py.

    Raises:
      UsageError: as `check_comparison`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    settings = load_settings(Compare, argv, prog=prog)
    check_comparison(settings)
    return settings
