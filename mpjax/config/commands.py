"""The settings of the commands other than train, and their parsers."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from mpjax.config.load import load_config
from mpjax.config.paths import expanded
from mpjax.config.schema import Config
from mpjax.errors import UsageError


T = TypeVar("T")

ENDINGS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")
"""Image formats that plots are written in."""


def check_image(flag: str, path: str) -> None:
    """Raises UsageError if a plot cannot be written to a path; an empty path means no plot."""
    ending = pathlib.PurePath(path).suffix
    if path and ending.lower().removeprefix(".") not in ENDINGS:
        raise UsageError(f"{flag} {path} ends in '{ending}': wanted .{', .'.join(ENDINGS)}")
    folder = expanded(path).parent
    if path and not folder.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {folder}")


def load_settings(kind: type[T], argv: Sequence[str], *, prog: str) -> T:
    """Parses the command line of a script into its settings, a dataclass of this file.

    Raises:
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    return tyro.cli(kind, args=list(argv), prog=prog, use_underscores=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Find where the training curves of runs diverge. Runs that differ only in the seed form a group, and their spread
    is its band. Every group is compared with the group of the first run."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN RUN ...")]
    """Folders of two or more runs."""
    seeds: tuple[int, ...] = ()
    """Seeds of each group to compare; empty: all."""
    metrics: tuple[str, ...] = ("train/loss", "test/accuracy", "train/loss_scale", "train/grad_norm")
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


def check_comparison(settings: Comparison) -> None:
    """Raises UsageError if the settings of a comparison are out of range or incomplete."""
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
    """Parses a command line of compare.py.

    Raises:
      UsageError: as `check_comparison`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings = load_settings(Comparison, argv, prog=prog)
    check_comparison(settings)
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluate a checkpoint on the test set of its run, with the run's precision policy or another."""

    run: str
    """Folder of the run."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    policy: str = ""
    """Precision policy; empty: the policy of the run."""
    split: str = ""
    """Split to evaluate on; empty: the test split of the run."""
    ema: bool = False
    """Evaluate the exponential moving average of the parameters."""
    test_time_augmentation: Literal["", "none", "mirror", "mirror_translate"] = ""
    """Views of each image whose logits are averaged, as --data.test_time_augmentation of train.py; empty: as in the
    run."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Export the weights of a checkpoint to a safetensors file, for mpjax or another library."""

    run: str
    """Folder of the run."""
    output: str
    """File to write, `.safetensors`."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    ema: bool = False
    """Write the exponential moving average of the parameters."""
    layout: Literal["mpjax", "huggingface", "timm"] = "mpjax"
    """Library whose names and layouts the file uses; huggingface and timm only for models that they have too."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of the parameters in the file; empty: the dtype in the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Diagnose whether precision is at fault: run one step of a run under its policy and in float32, find where they
    diverge, and find what repairs it."""

    run: str
    """Folder of the run."""
    step: int = 0
    """Attempted step to diagnose, replayed from the checkpoint before it; 0: the step after the last checkpoint."""
    policy: str = ""
    """Precision policy to diagnose; empty: the policy of the run."""
    loss_scale: float = 0.0
    """Loss scale of the step; 0: the loss scale of the run at that step."""
    tolerance: float = 0.05
    """Largest relative error of the loss, and largest share of a gradient's norm lost to underflow, that is healthy."""
    search: Literal["repair", "fastest", "none"] = "repair"
    """`repair`: find and verify the smallest set of modules that repairs the step when kept in float32.
    `fastest`: instead of a diagnosis, find the policy with the most half precision within the tolerance.
    `none`: no search."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    json: bool = False
    """Print one JSON object instead of text."""


GpuName = Literal["v100", "a100", "l4", "h100", "h200", "b200"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predict whether a run fits on a GPU and how fast it is, by compiling its training step. No GPU is needed.

    --config FILE (repeatable) and all flags of train.py, listed by `train.py --help`, define the run."""

    gpu: tuple[GpuName, ...] = ()
    """GPUs to plan for, one or more."""
    policies: tuple[str, ...] = ()
    """Precision policies to compare; empty: the policy of the run."""
    devices: int = 1
    """GPUs that a batch is sharded over; memory and time are per GPU."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto: the same as a run on that GPU, cuDNN's fused kernel where possible."""
    memory_fraction: float = 0.75
    """Share of GPU memory that a run may use, as XLA_PYTHON_CLIENT_MEM_FRACTION; the default is that of JAX."""
    vocabulary: int = 0
    """Vocabulary size, for a tokenizer that is not on this machine; 0: ask the tokenizer."""
    fit: bool = True
    """Estimate the largest batch that fits; needs at most one more compilation per policy and GPU."""
    verify: bool = False
    """Verify the largest batch by compiling it, with corrections if needed: up to five more compilations."""
    xla: tuple[str, ...] = ()
    """XLA options to compare with the defaults, one or more in each word: "xla_gpu_enable_triton_gemm=false"."""
    costliest: int = 10
    """Number of kinds of kernels to list with the module and source line of each, the costliest first."""
    measure: bool = True
    """Also time the step if such a GPU is present, and report the measurement beside the prediction."""
    plot: str = ""
    """Image file of memory and time; empty: none."""
    json: bool = False
    """Print one JSON object instead of tables."""


def check_plan(settings: Plan) -> None:
    """Raises UsageError if the settings of a plan are out of range or incomplete."""
    if not settings.gpu:
        raise UsageError("--gpu is empty: wanted one or more, such as h100")
    for name in ("gpu", "policies", "xla"):
        given = getattr(settings, name)
        if twice := [value for i, value in enumerate(given) if value in given[:i]]:
            raise UsageError(f"--{name} has {twice[0]} twice: wanted different ones")
    if settings.devices < 1:
        raise UsageError(f"--devices is {settings.devices}: wanted at least 1")
    if settings.vocabulary < 0:
        raise UsageError(f"--vocabulary is {settings.vocabulary}: wanted 0 or more")
    if not 0 < settings.memory_fraction <= 1:
        raise UsageError(f"--memory_fraction is {settings.memory_fraction}: wanted a share above 0, at most 1")
    for words in settings.xla:
        xla_options(words)
    if settings.costliest < 0:
        raise UsageError(f"--costliest is {settings.costliest}: wanted 0 or more")
    check_image("--plot", settings.plot)


def xla_options(words: str) -> dict[str, Any]:
    """Parses XLA options.

    >>> xla_options("xla_gpu_enable_triton_gemm=false xla_gpu_autotune_level=0")
    {'xla_gpu_enable_triton_gemm': False, 'xla_gpu_autotune_level': 0}

    Raises:
      UsageError: a word is not NAME=VALUE with a name that begins with `xla_`.
    """
    options: dict[str, Any] = {}
    for word in words.split():
        name, equals, value = word.partition("=")
        name = name.lstrip("-")
        if not equals or not value or not name.startswith("xla_"):
            raise UsageError(f"--xla has '{word}': wanted xla_NAME=VALUE, such as xla_gpu_enable_triton_gemm=false")
        number = value.removeprefix("-").isdecimal()
        options[name] = value == "true" if value in ("true", "false") else int(value) if number else value
    return options


def load_plan(argv: Sequence[str], *, prog: str) -> tuple[Plan, Config]:
    """Parses a command line of plan.py into the settings of the plan and those of the planned run.

    Raises:
      UsageError: as `check_plan` and `load_config`.
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings, rest = tyro.cli(Plan, args=list(argv), prog=prog, use_underscores=True, return_unknown_args=True)
    check_plan(settings)
    return settings, load_config(rest, prog=prog)


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
      SystemExit: code 0 after `--help`, 2 after a wrong flag; the message is printed.
    """
    settings, rest = tyro.cli(OnRay, args=list(argv), prog=prog, use_underscores=True, return_unknown_args=True)
    config = load_config(rest, prog=prog)
    check_on_ray(settings, config)
    return settings, config
