"""Weights & Biases as a writer, `--report.writers wandb`. Its own settings are variables such as `WANDB_PROJECT`."""

import pathlib
import tomllib
from collections.abc import Mapping, Sequence

import numpy as np

from mpjax.config.save import to_toml
from mpjax.errors import UsageError
from mpjax.extend import RunInfo
from mpjax.report.loggers.background import InBackground, Logger, require_package, stored_id


NAME = "wandb"


class WandbLogger(Logger):
    """A W&B run: metrics by step, settings, and files as an artifact.

    Its id is stored in the run's folder, in `wandb_id`. A resumed run continues the W&B run with that id.
    """

    def __init__(self, run: RunInfo):
        import wandb

        self._wandb, id_file = wandb, run.folder / "wandb_id"
        self._run = wandb.init(
            name=run.folder.name,
            dir=run.folder,
            config=tomllib.loads(to_toml(run.config)),
            id=stored_id(id_file),
            resume="allow",
            settings=wandb.Settings(console="off"),  # mpjax alone prints to the console
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._run.log({name: self._wandb.Image(pixels) for name, pixels in images.items()}, step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def open_wandb(run: RunInfo) -> InBackground:
    """Opens a writer to Weights & Biases, which sends in its own thread.

    Raises:
      UsageError: the package is not installed, or W&B has no key and is not offline.
    """
    require_package(NAME, NAME)
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise UsageError("--report.writers wandb: no API key; write `wandb login`, or set WANDB_MODE=offline")
    return InBackground(NAME, lambda: WandbLogger(run), run.folder)
