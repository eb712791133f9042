"""The settings of the commands other than train, and how they are read."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from mpjax.config.load import load_config
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
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


def check_comparison(settings: Comparison) -> None:
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
      UsageError: as `check_comparison`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings = tyro.cli(Comparison, args=list(argv), prog=prog, use_underscores=True)
    check_comparison(settings)
    return settings


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write the weights of a run's checkpoint to a safetensors file, for mpjax or for another library."""

    run: str
    """Folder of the run."""
    output: str
    """The file to write, `.safetensors`."""
    checkpoint: str = "best"
    """`best`, `latest`, or a position (attempted steps)."""
    ema: bool = False
    """Write the moving average of the parameters."""
    layout: Literal["mpjax", "huggingface", "timm"] = "mpjax"
    """Whose names and arrangement the file has; the other libraries' for the models that they have too."""
    trust_code: bool = False
    """Execute code outside mpjax that the run names: a model, a function for its data."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Of the parameters in the file; empty: as the run stores them."""


def load_export(argv: Sequence[str], *, prog: str) -> Export:
    """The settings of a command line.

    Raises:
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    return tyro.cli(Export, args=list(argv), prog=prog, use_underscores=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inquiry:
    """Is precision to blame? One step of a run under its policy and in float32: where they part, what repairs it."""

    run: str
    """Folder of the run."""
    step: int = 0
    """Which step (attempted), reached by running again from the checkpoint before it; 0: the one after the last
    checkpoint."""
    policy: str = ""
    """Precision policy in question; empty: the run's own."""
    loss_scale: float = 0.0
    """Loss scale of the step; 0: the run's own there."""
    tolerance: float = 0.05
    """Largest relative error of the loss, and share of a gradient's norm lost to zero, that counts as healthy."""
    search: Literal["repair", "fastest", "none"] = "repair"
    """`repair`: look for the smallest set of modules to keep in float32 that repairs the step, and verify it;
    `fastest`: instead of a diagnosis, the policy that leaves most to half precision within the tolerance."""
    trust_code: bool = False
    """Execute code outside mpjax that the run names: a model, a function for its data."""
    json: bool = False
    """Print one JSON object instead of text."""


def load_inquiry(argv: Sequence[str], *, prog: str) -> Inquiry:
    """The settings of a command line.

    Raises:
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    return tyro.cli(Inquiry, args=list(argv), prog=prog, use_underscores=True)


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


def check_plan(settings: Plan) -> None:
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
      UsageError: as `check_plan` and `load_config`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings, rest = tyro.cli(Plan, args=list(argv), prog=prog, use_underscores=True, return_unknown_args=True)
    check_plan(settings)
    return settings, load_config(rest, prog=prog)
