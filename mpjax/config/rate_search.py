"""The settings of the search for a learning rate, and their parser."""

import dataclasses
from collections.abc import Sequence

from mpjax.config.load import load_beside
from mpjax.config.schema import Config, Distributed
from mpjax.errors import UsageError


LEAST = 20
"""The smallest number of updates in which a slope differs from noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateSearch:
    """Find a learning rate: train a few updates at rates that grow from the lowest to the highest, and suggest the rate
    at which the loss falls fastest.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run. Its length,
    learning rate, warm-up and schedule are not used."""

    lowest: float = 1e-6
    """Learning rate of the first update."""
    highest: float = 10.0
    """Learning rate of the last update."""
    updates: int = 100
    """Number of updates. Steps that are skipped because of an overflow are repeated at their rate."""
    stop_above: float = 4.0
    """Stop when the smoothed loss is this many times its smallest value."""
    json: bool = False
    """Print one JSON object instead of lines."""


def check_rate_search(settings: RateSearch, config: Config) -> None:
    """Raises UsageError if the settings are out of range or contradict those of the run."""
    if not 0 < settings.lowest < settings.highest < float("inf"):
        raise UsageError(
            f"--lowest {settings.lowest:g} --highest {settings.highest:g}: wanted positive rates, the lowest first"
        )
    if settings.updates < LEAST:
        raise UsageError(f"--updates {settings.updates}: wanted at least {LEAST}")
    if not settings.stop_above > 1:
        raise UsageError(f"--stop_above {settings.stop_above:g}: wanted a number above 1")
    if config.resume:
        raise UsageError("--resume: the search begins with fresh parameters; leave it out")
    if config.seeds:
        raise UsageError("--seeds: the search trains one model; write --seed")
    if config.distributed != Distributed():
        raise UsageError("--distributed: the search needs one process; leave it out")


def load_rate_search(argv: Sequence[str], *, prog: str) -> tuple[RateSearch, Config]:
    """Parses a command line of find_lr.py into the settings of the search and those of the run.

    Raises:
      UsageError: as `check_rate_search` and `load_config`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    settings, config = load_beside(RateSearch, argv, prog=prog)
    check_rate_search(settings, config)
    return settings, config
