"""MLflow, with its package installed, in its store of files."""

import re

import numpy as np
import pytest

from mpjax.config import Config
from mpjax.errors import LoggerWarning, UsageError
from mpjax.extend import RunInfo
from mpjax.report import open_named_writers


pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="pip install -e '.[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    (tmp_path / "config.toml").write_text("steps = 3\n")
    return RunInfo(tmp_path, Config(), 0, 3, True, [])


def test_metrics_settings_and_files_are_stored_and_a_resumed_run_goes_on(run):
    import mlflow

    for step in (1, 2):
        (writer,) = open_named_writers(["mlflow"], run)
        writer.write(step, {"train/loss": 1.0 / step})
        writer.close()
    client = mlflow.MlflowClient()
    number = (run.folder / "mlflow_id").read_text()
    history = client.get_metric_history(number, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5)]
    found = client.get_run(number)
    assert found.data.params["precision.policy"] == "mixed_float16"
    assert found.info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(number)] == ["config.toml"]


def test_pictures_are_stored_with_their_step(run):
    import mlflow

    (writer,) = open_named_writers(["mlflow"], run)
    writer.images(7, {"masks/3": np.zeros((2, 3, 3), np.uint8)})
    writer.close()
    number = (run.folder / "mlflow_id").read_text()
    paths = [file.path for file in mlflow.MlflowClient().list_artifacts(number, "images")]
    assert any(re.search(r"masks.3.step.7.*\.png", path) for path in paths), paths


def test_a_server_that_is_down_stops_no_run(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (writer,) = open_named_writers(["mlflow"], run)
    writer._thread.join(60)
    with pytest.warns(LoggerWarning, match="mlflow: .*nothing more is sent, and the run goes on"):
        writer.write(1, {"train/loss": 1.0})
    writer.close()


def test_a_store_of_files_that_mlflow_refuses_is_an_error_before_the_run(run, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    said = "--report.writers mlflow: nothing can be stored at file:.*; write MLFLOW_TRACKING_URI=http.*ALLOW_FILE_STORE"
    with pytest.raises(UsageError, match=said):
        open_named_writers(["mlflow"], run)


def test_a_database_that_cannot_be_opened_is_an_error_before_the_run(run, monkeypatch):
    """For want of the package alembic, or of the folder."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/x.db")
    with pytest.raises(UsageError, match=r"nothing can be stored at sqlite:////proc/nowhere/x.db: \w+: .+; write"):
        open_named_writers(["mlflow"], run)
