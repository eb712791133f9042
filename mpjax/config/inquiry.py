"""Settings of a diagnosis of a run, and how they are read."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro


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
