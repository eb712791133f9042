"""MLflow as a writer, `--report.writers mlflow`. Its own settings are variables such as `MLFLOW_TRACKING_URI`."""

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.errors import UsageError, first_line
from mpjax.extend import RunInfo
from mpjax.report.loggers.background import InBackground, Logger, flat_settings, require_package, stored_id


NAME = "mlflow"

_LONGEST = 6000  # the most characters of a parameter that MLflow accepts


class MlflowLogger(Logger):
    """An MLflow run: metrics by step, settings as parameters, and files as artifacts.

    Its id is stored in the run's folder, in `mlflow_id`. A resumed run continues the MLflow run with that id.
    Infinities are sent as NaN.
    """

    def __init__(self, run: RunInfo):
        import mlflow

        self._client: Any = mlflow.MlflowClient()
        id_file = run.folder / "mlflow_id"
        if known := stored_id(id_file):
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "mpjax"))
        self._id = self._client.create_run(experiment.experiment_id, run_name=run.folder.name).info.run_id
        id_file.write_text(self._id, encoding="utf-8")
        for name, value in flat_settings(run.config).items():
            self._client.log_param(self._id, name, str(value)[:_LONGEST])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value if math.isfinite(value) else math.nan, step=step)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        for name, pixels in images.items():
            self._client.log_image(self._id, pixels, key=name, step=step)

    def files(self, paths: Sequence[pathlib.Path]) -> None:
        for path in paths:
            self._client.log_artifact(self._id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_mlflow(run: RunInfo) -> InBackground:
    """Opens a writer to MLflow, which sends in its own thread. If a remote server fails, the writer only warns.

    Raises:
      UsageError: the package is not installed, or its store on this machine cannot be opened.
    """
    require_package(NAME, NAME)
    _require_store()
    return InBackground(NAME, lambda: MlflowLogger(run), run.folder)


def _require_store() -> None:
    """Raises UsageError if MLflow cannot open a store on this machine.

    Remote stores are not checked, because a server may be down for a while.
    """
    import mlflow

    address = mlflow.get_tracking_uri()
    if address.partition(":")[0].partition("+")[0] in _REMOTE:
        return
    try:
        mlflow.MlflowClient().search_experiments(max_results=1)
    except Exception as error:  # MLflow may raise any exception
        raise UsageError(
            f"--report.writers mlflow: nothing can be stored at {address}: {first_line(error)}; write "
            "MLFLOW_TRACKING_URI=http://HOST:PORT for a server, MLFLOW_ALLOW_FILE_STORE=true "
            "MLFLOW_TRACKING_URI=file:./mlruns for files, or pip install mlflow for a database"
        ) from error


_REMOTE = ("http", "https", "databricks", "databricks-uc", "uc", "mysql", "postgresql", "mssql")
"""Schemes of stores on other machines, without any `+driver`."""
