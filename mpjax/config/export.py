"""Settings of an export, and how they are read."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro


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
