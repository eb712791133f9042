"""Settings of an evaluation, and how they are read."""

import dataclasses
from collections.abc import Sequence

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measure a checkpoint on its run's test set, under its own or another precision policy."""

    run: str
    """Folder of the run."""
    checkpoint: str = "best"
    """`best`, `latest`, or a position (attempted steps)."""
    policy: str = ""
    """Precision policy; empty: the run's own."""
    split: str = ""
    """Split to evaluate on; empty: the run's own test split."""
    ema: bool = False
    """Evaluate the moving average of the parameters."""
    trust_code: bool = False
    """Execute code outside mpjax that the run names: a model, a function for its data."""
    json: bool = False
    """Print one JSON object instead of lines."""


def load_evaluation(argv: Sequence[str], *, prog: str) -> Evaluation:
    """The settings of a command line.

    Raises:
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    return tyro.cli(Evaluation, args=list(argv), prog=prog, use_underscores=True)
