"""The settings of predictions, and their parser."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from mpjax.config.commands import load_settings
from mpjax.config.setting_types import Texts
from mpjax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predict with a checkpoint of a run: a JSON line for each image, text or example of a split, in order.

    Images are files, folders or quoted globs. Texts are the lines of files, or of stdin for `-`, or a column of .csv
    and .tsv files. They are read as the run's evaluation reads its data set, which has to be there too."""

    inputs: Annotated[tyro.conf.Positional[Texts], tyro.conf.arg(metavar="INPUT ...")] = ()
    """Images, or files of texts."""
    run: str
    """Folder of the run."""
    split: str = ""
    """Split of the run's data set to predict instead of inputs, such as `test` or `train[80%:]`."""
    checkpoint: str = "best"
    """`best`, `latest`, or a number of attempted steps."""
    policy: str = ""
    """Precision policy; empty: the policy of the run."""
    ema: bool = False
    """Predict with the exponential moving average of the parameters."""
    top: int = 5
    """Most probable classes to print, at most all."""
    column: str = "text"
    """Column of the texts in .csv and .tsv files."""
    output: str = ""
    """File of the JSON lines; empty: stdout. For segmentation: folder of the masks, as PNG with class numbers."""
    batch_size: int = 0
    """Examples per batch; 0: as in the run's evaluation."""
    skip_bad: bool = False
    """Report an input that cannot be read on stderr and go on without it."""
    trust_code: bool = False
    """Allow execution of code outside mpjax that the run names: a model, or a function for its data."""


def check_prediction(settings: Prediction) -> None:
    """Raises UsageError if the settings of predictions are out of range or contradict each other."""
    if bool(settings.inputs) == bool(settings.split):
        given = "both inputs and --split" if settings.split else "neither inputs nor --split"
        raise UsageError(f"{given}: wanted one, such as photos/ or 'photos/*.jpg' or --split test")
    for name, least in (("top", 1), ("batch_size", 0)):
        if (value := getattr(settings, name)) < least:
            raise UsageError(f"--{name} is {value}: wanted at least {least}")


def load_prediction(argv: Sequence[str], *, prog: str) -> Prediction:
    """Parses a command line of predict.py.

    Raises:
      UsageError: as `check_prediction` and `load_settings`.
      SystemExit: code 0 after `--help`; the help is printed.
    """
    settings = load_settings(Prediction, argv, prog=prog)
    check_prediction(settings)
    return settings
