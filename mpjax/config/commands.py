"""The settings of the commands on a stored run, and their parser."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal, TypeVar

from mpjax.config.arguments import parse
from mpjax.config.paths import expanded
from mpjax.config.setting_types import Texts
from mpjax.errors import UsageError


T = TypeVar("T")

ENDINGS = ("png", "pdf", "svg", "jpg", "jpeg", "webp")
"""Image formats of plots."""


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
      UsageError: a flag is unknown, missing or has a wrong value.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    return parse(kind, argv, prog=prog)


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
    """Split of the data set to evaluate on, such as `test` or `train[80%:]`; empty: the test split of the run."""
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
    """Export a checkpoint: its weights for mpjax or another library, or a program that needs JAX alone."""

    run: str
    """Folder of the run."""
    output: str
    """File to write: `.safetensors` for weights, any other ending for a program."""
    what: Literal["weights", "program"] = "weights"
    """weights: the parameters, as safetensors. program: the model with its weights, from a batch as it is stored to
    logits, as `jax.export` writes it."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    ema: bool = False
    """Write the exponential moving average of the parameters."""
    layout: Literal["mpjax", "huggingface", "timm"] = "mpjax"
    """Weights: library whose names and layouts the file uses; huggingface, timm only for models that they have too."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Weights: dtype of the parameters in the file; empty: the dtype in the checkpoint."""
    policy: str = ""
    """Programs: the precision to compute in; empty: the run's own."""
    platforms: Texts = ("cpu", "cuda")
    """Programs: the platforms that can run the file, of `cpu`, `cuda`, `rocm` and `tpu`."""


def check_export(settings: Export) -> None:
    """Raises UsageError if a setting is for the other kind of file."""
    default = Export(run="", output="")
    others = ("policy", "platforms") if settings.what == "weights" else ("layout", "dtype")
    for name in others:
        if getattr(settings, name) != getattr(default, name):
            raise UsageError(f"--{name} has no meaning for --what {settings.what}: leave it out")
    if settings.what == "program" and settings.output.endswith(".safetensors"):
        raise UsageError(f"--output {settings.output}: .safetensors is for --what weights; wanted another ending")
    if not settings.platforms or not set(settings.platforms) <= set(PLATFORMS):
        raise UsageError(f"--platforms {' '.join(settings.platforms)}: wanted some of {', '.join(PLATFORMS)}")


PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""The platforms that JAX can compile a program for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Diagnose whether precision is at fault: run one step of a run under its policy and in float32, find where they
    diverge, and find what repairs it."""

    run: str
    """Folder of the run."""
    step: int = 0
    """Attempted step to diagnose, replayed from the checkpoint before it; 0: the step after the last checkpoint."""
    evaluation: bool = False
    """Diagnose the evaluation of the checkpoint after `--step` steps (0: of the last one) in place of a step."""
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


def load_evaluation(argv: Sequence[str], *, prog: str) -> Evaluation:
    """Parses a command line of evaluate.py; raises as `load_settings`."""
    return load_settings(Evaluation, argv, prog=prog)


def load_export(argv: Sequence[str], *, prog: str) -> Export:
    """Parses a command line of export.py; raises as `load_settings`."""
    return load_settings(Export, argv, prog=prog)


def load_diagnosis(argv: Sequence[str], *, prog: str) -> Diagnose:
    """Parses a command line of diagnose.py; raises as `load_settings`."""
    return load_settings(Diagnose, argv, prog=prog)
