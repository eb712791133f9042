"""Comet as a writer, `--report.writers comet`. Its own settings are variables such as `COMET_PROJECT_NAME`."""

import importlib
import importlib.util
import os
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.config import to_toml
from mpjax.config.save import flat
from mpjax.errors import UsageError
from mpjax.extend import RunInfo
from mpjax.report.loggers.background import InBackground, require_package


NAME, PACKAGE = "comet", "comet_ml"

_ID = "comet_id"
"""The file in a run's folder with the key under which a resumed run continues."""


class CometLogger:
    """A Comet experiment: metrics by step, settings as parameters, and files as assets."""

    def __init__(self, run: RunInfo):
        comet: Any = importlib.import_module(PACKAGE)
        file = run.folder / _ID
        known = file.read_text().strip() if file.exists() else None
        self._experiment: Any = comet.start(
            experiment_key=known,
            mode="get_or_create",
            experiment_config=comet.ExperimentConfig(
                name=run.folder.name,
                log_code=False,
                log_git_patch=False,
                parse_args=False,
                auto_output_logging=False,  # the console stays mpjax's
                auto_param_logging=False,
                auto_metric_logging=False,
                display_summary_level=0,
            ),
        )
        if not self._experiment.alive:  # Comet logs the error itself, and accepts calls without effect
            raise ConnectionError("Comet cannot be reached")
        file.write_text(self._experiment.get_key())
        if known is None:
            self._experiment.log_parameters(
                {name: str(value) for name, value in flat(tomllib.loads(to_toml(run.config)))}
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._experiment.log_metrics(dict(metrics), step=step)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Logs images of a step."""
        from PIL import Image  # late: few runs have images

        for name, pixels in images.items():  # Comet would rescale the colours of an array
            self._experiment.log_image(Image.fromarray(pixels), name=name, step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        """Stores files as assets of the experiment."""
        for path in paths:
            self._experiment.log_asset(str(path), file_name=path.name, overwrite=True)

    def close(self) -> None:
        """Sends the remaining data."""
        self._experiment.end()


def open_comet(run: RunInfo) -> InBackground:
    """Opens the writer.

    Raises:
      UsageError: the package is not installed, or Comet has no key and is not offline.
    """
    require_package(NAME, importlib.util.find_spec(PACKAGE))
    os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "0")  # otherwise its errors are reported to Comet
    comet: Any = importlib.import_module(PACKAGE)
    settings = comet.get_config()
    if settings["comet.start.online"] is not False and not settings["comet.api_key"]:
        raise UsageError("--report.writers comet: no API key; write `comet login`, or set COMET_START_ONLINE=0")
    return InBackground(NAME, lambda: CometLogger(run), run.folder)
