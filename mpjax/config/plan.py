"""Settings of a plan, and how they are read: flags of its own, and any setting of a run."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro

from mpjax.config.images import check_image
from mpjax.config.load import load
from mpjax.config.schema import Config
from mpjax.errors import UsageError


GpuName = Literal["v100", "a100", "l4", "h100", "h200", "b200"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Will a run fit, and how fast can it be? Its training step is compiled for a GPU, which need not be there.

    --config FILE (repeatable) and every flag of train.py say which run, as `train.py --help` lists them."""

    gpu: tuple[GpuName, ...] = ()
    """GPUs to plan for: one or several; none is an error."""
    policies: tuple[str, ...] = ()
    """Precision policies to set side by side; none: the run's own."""
    devices: int = 1
    """GPUs that share a batch; numbers are those of one of them."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """How attention is computed: auto takes what a run on that GPU takes, cuDNN's fused kernel where it can."""
    memory_fraction: float = 0.75
    """Share of the GPU's memory that a run may use: XLA_PYTHON_CLIENT_MEM_FRACTION, of which this is JAX's default."""
    vocabulary: int = 0
    """Tokens that the tokenizer knows, where it cannot be asked because it is not on this machine; 0: ask it."""
    fit: bool = True
    """Look for the largest batch that fits, by one more compilation for each policy and GPU."""
    verify: bool = False
    """Compile that batch too, and mend it until it fits and fills the memory: by up to five more compilations."""
    measure: bool = True
    """Where such a GPU is present, time the step on it too, and set the measurement beside the prediction."""
    plot: str = ""
    """Image of memory and time; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""


def check(settings: Plan) -> None:
    """Raises UsageError where settings make no plan."""
    if not settings.gpu:
        raise UsageError("--gpu is empty: wanted one or more, such as h100")
    for name in ("gpu", "policies"):
        given = getattr(settings, name)
        if twice := [value for i, value in enumerate(given) if value in given[:i]]:
            raise UsageError(f"--{name} has {twice[0]} twice: wanted different ones")
    if settings.devices < 1:
        raise UsageError(f"--devices is {settings.devices}: wanted at least 1")
    if settings.vocabulary < 0:
        raise UsageError(f"--vocabulary is {settings.vocabulary}: wanted 0 or more")
    if not 0 < settings.memory_fraction <= 1:
        raise UsageError(f"--memory_fraction is {settings.memory_fraction}: wanted a share above 0, at most 1")
    check_image("--plot", settings.plot)


def load_plan(argv: Sequence[str], *, prog: str) -> tuple[Plan, Config]:
    """The settings of a command line: those of the plan, and those of the run that is planned.

    Raises:
      UsageError: as `check` and `load`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings, rest = tyro.cli(Plan, args=list(argv), prog=prog, use_underscores=True, return_unknown_args=True)
    check(settings)
    return settings, load(rest, prog=prog)
