"""Comet as a writer, `--report.writers comet`. Its own settings are variables such as `COMET_PROJECT_NAME`."""

import importlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.errors import UsageError
from mpjax.extend import RunInfo
from mpjax.report.loggers.background import InBackground, Logger, flat_settings, require_package, stored_id


NAME, PACKAGE = "comet", "comet_ml"


class CometLogger(Logger):
    """A Comet experiment: metrics by step, settings as parameters, and files as assets.

    Its key is stored in the run's folder, in `comet_id`. A resumed run continues the experiment with that key.
    """

    def __init__(self, run: RunInfo):
        comet: Any = importlib.import_module(PACKAGE)
        id_file = run.folder / "comet_id"
        key = stored_id(id_file)
        self._experiment: Any = comet.start(
            experiment_key=key,
            mode="get_or_create",
            experiment_config=comet.ExperimentConfig(
                name=run.folder.name,
                log_code=False,
                log_git_patch=False,
                parse_args=False,
                auto_output_logging=False,  # mpjax alone prints to the console
                auto_param_logging=False,
                auto_metric_logging=False,
                display_summary_level=0,
            ),
        )
        if not self._experiment.alive:  # Comet logs the error itself, and accepts calls without effect
            raise ConnectionError("Comet cannot be reached")
        id_file.write_text(self._experiment.get_key(), encoding="utf-8")
        if key is None:
            self._experiment.log_parameters({name: str(value) for name, value in flat_settings(run.config).items()})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(metrics), step=step)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        from PIL import Image  # imported here, because few runs have images

        for name, pixels in images.items():  # Comet would rescale the colours of an array
            self._experiment.log_image(Image.fromarray(pixels), name=name, step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        for path in paths:
            self._experiment.log_asset(str(path), file_name=path.name, overwrite=True)

    def close(self) -> None:
        self._experiment.end()


def open_comet(run: RunInfo) -> InBackground:
    """Opens a writer to Comet, which sends in its own thread. If Comet cannot be reached, the writer only warns.

    Raises:
      UsageError: the package is not installed, or Comet has no key and is not offline.
    """
    require_package(NAME, PACKAGE)
    os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "0")  # otherwise its errors are reported to Comet
    comet: Any = importlib.import_module(PACKAGE)
    settings = comet.get_config()
    if settings["comet.start.online"] is not False and not settings["comet.api_key"]:
        raise UsageError("--report.writers comet: no API key; write `comet login`, or set COMET_START_ONLINE=0")
    return InBackground(NAME, lambda: CometLogger(run), run.folder)
