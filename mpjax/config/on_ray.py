"""The settings of a training on Ray, and their parser."""

import dataclasses
from collections.abc import Sequence

from mpjax.config.load import load_beside
from mpjax.config.schema import Config
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnRay:
    """Train on Ray. It starts a worker for each process of the run. If one dies, it starts all again from the last
    checkpoint.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run."""

    workers: int = 1
    """Number of workers."""
    gpus: int = -1
    """GPUs of each worker; -1: one if the cluster has GPUs, else none."""
    cpus: int = 1
    """CPUs that Ray reserves for each worker."""
    restarts: int = 3
    """Times that Ray starts the workers again after one has died; -1: without a limit."""
    address: str = ""
    """Address of the Ray cluster; empty: `$RAY_ADDRESS`, else the cluster that this machine belongs to, else this
    machine alone."""


def check_on_ray(settings: OnRay, config: Config) -> None:
    """Raises UsageError if the settings of a training on Ray are out of range or contradict those of the run."""
    for name, least in (("workers", 1), ("gpus", -1), ("cpus", 0), ("restarts", -1)):
        if (given := getattr(settings, name)) < least:
            raise UsageError(f"--{name} is {given}: wanted at least {least}")
    place = config.distributed
    if (place.coordinator, place.processes, place.process) != ("", 0, -1):
        raise UsageError("Ray numbers the processes: leave out --distributed.coordinator, processes and process")


def load_on_ray(argv: Sequence[str], *, prog: str) -> tuple[OnRay, Config]:
    """Parses a command line of train_ray.py into the settings of the workers and those of the run.

    Raises:
      UsageError: as `check_on_ray` and `load_config`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    settings, config = load_beside(OnRay, argv, prog=prog)
    check_on_ray(settings, config)
    return settings, config
