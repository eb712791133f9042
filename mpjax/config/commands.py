"""The settings of the commands on a stored run, and their parser."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal, TypeVar

from mpjax.config.arguments import parse
from mpjax.config.paths import expanded
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


def load_evaluation(argv: Sequence[str], *, prog: str) -> Evaluation:
    """Parses a command line of evaluate.py; raises as `load_settings`."""
    return load_settings(Evaluation, argv, prog=prog)


def load_export(argv: Sequence[str], *, prog: str) -> Export:
    """Parses a command line of export.py; raises as `load_settings`."""
    return load_settings(Export, argv, prog=prog)


def load_diagnosis(argv: Sequence[str], *, prog: str) -> Diagnose:
    """Parses a command line of diagnose.py; raises as `load_settings`."""
    return load_settings(Diagnose, argv, prog=prog)
