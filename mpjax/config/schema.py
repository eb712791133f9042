"""Every setting of a run, with its default and its help text; the defaults train ResNet-18 on digits.

The sections of data and model are in `inputs.py`, those of the training step in `step.py`. These files import no JAX,
so that `--help` and a mistyped flag answer at once.
"""

import dataclasses
from typing import Literal

from mpjax.config.choices import TaskName
from mpjax.config.durations import Duration
from mpjax.config.flag_types import Steps, epochs, settle_durations
from mpjax.config.inputs import Data, Model
from mpjax.config.several_words import Integers, PlotFormats, Texts
from mpjax.config.step import Mesh, Optimizer, Precision, Training


__all__ = [
    "Config",
    "Data",
    "Diagnosis",
    "Distributed",
    "Loop",
    "Mesh",
    "Model",
    "Optimizer",
    "Precision",
    "Report",
    "Training",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distributed:
    """One run over several processes. Started by SLURM, Open MPI, Kubernetes or on TPUs, it needs no flags."""

    coordinator: str = ""
    """Address of process 0 as the others reach it, `HOST:PORT`, with a port that is free there."""
    processes: int = 0
    """Number of processes; 0: as the cluster says; 1: this process alone, whatever the cluster says."""
    process: int = -1
    """Number of this process, from 0; -1: as the cluster says."""
    timeout: float = 300.0
    """Seconds to wait until all processes are there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """Frequency of logging, evaluations and checkpoints."""

    log_every: Steps = Duration(20)
    """Interval between logged metrics."""
    eval_every: Steps = epochs(5)
    """Interval between evaluations; there is always one at the end."""
    save_every: Steps = epochs(5)
    """Interval between checkpoints; there is always one at the end and on interruption."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best."""
    best: str = ""
    """Metric of the test set that chooses the best checkpoint, as in `loss`; empty: as usual for the task."""
    best_is: Literal["auto", "min", "max"] = "auto"
    """Whether the best value of loop.best is the smallest or the largest; auto: known for mpjax's own metrics."""
    stop_after: int = 0
    """Early stopping: training ends after this many evaluations in a row without a better loop.best; 0: never."""
    stop_delta: float = 0.0
    """Early stopping: a value is better if it differs from the best so far by more than this."""
    callbacks: Texts = ()
    """Your callbacks, classes (or functions that return an object) with methods such as `evaluated`: `FILE.py:NAME` or
    `package.module:NAME` each."""

    def __post_init__(self):
        settle_durations(self, "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Outputs of a run besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    images: int = 4
    """Segmentation: number of test images that TensorBoard and loggers get at each evaluation, with their masks and the
    predicted ones; 0: none."""
    plot: bool = True
    """Plot the curves of the run at the end: curves.png, and of several seeds seeds.png."""
    plot_format: PlotFormats = ("png",)
    """Formats of plots, one or more: `png`, `pdf`, `svg`."""
    writers: Texts = ()
    """Further destinations of metrics: `wandb`, `mlflow`, `comet`, or your own functions of the run that return a
    writer, `FILE.py:NAME` or `package.module:NAME` each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Statistics during training, and the search on divergence."""

    every: Steps = Duration(0)
    """Interval between statistics of every layer (range, overflow, underflow, histogram) in metrics.jsonl and
    TensorBoard; 0: none, at no cost."""
    search: bool = True
    """On divergence, find and verify the smallest set of modules that repairs the step when kept in float32."""

    def __post_init__(self):
        settle_durations(self, "every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model in mixed precision."""

    steps: Steps = epochs(30)
    """Length of training: attempted steps (skipped ones count), `1e6 examples` or `30 epochs`."""
    seed: int = 0
    """Random seed of initialisation, shuffling and augmentation."""
    seeds: Integers = ()
    """Train one run for each of these seeds in place of seed, in `seed_N` of output_dir; empty: one run."""
    task: TaskName = "classification"
    """What the model predicts: the class of an image, of each pixel or of a text, or the next token of a text. own: all
    columns of the data set are read, and --training.objective says what is learned."""
    output_dir: str = ""
    """Folder of the run: a new one, or with --resume an existing one; empty: runs/<data>-<model>-<policy>-<time>."""
    resume: bool = False
    """Resume from the last checkpoint in output_dir, with the settings of that run unless others are given."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the settings of a stored run name (--resume, or --config of a run's
    file): a model, or a function for its data. Code that this command line names does not need it."""
    other_data: bool = False
    """Allow --resume on other data than that of the checkpoint: other examples, labels, order or dtypes. The run says
    what differs."""
    profile: bool = False
    """Trace calls 6 to 10 into the run's tensorboard folder, for the TensorBoard profile plugin and XProf."""
    cache_dir: str = ""
    """Folder of compiled programs and prepared data; empty: `$MPJAX_CACHE`, by default `~/.cache/mpjax`."""
    data: Data = Data()
    model: Model = Model()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    mesh: Mesh = Mesh()
    distributed: Distributed = Distributed()
    loop: Loop = Loop()
    report: Report = Report()
    diagnosis: Diagnosis = Diagnosis()

    def __post_init__(self):
        settle_durations(self, "steps")
