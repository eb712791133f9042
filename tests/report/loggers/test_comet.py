"""Comet, with its package installed, offline."""

import gc
import json
import zipfile

import numpy as np
import pytest

from mpjax.config import Config
from mpjax.errors import LoggerWarning, UsageError
from mpjax.extend import RunInfo
from mpjax.report import open_named_writers


pytestmark = [
    pytest.mark.extra,
    pytest.mark.filterwarnings(
        "default::FutureWarning", "default::DeprecationWarning", "default::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml", reason="pip install -e '.[comet]'")
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "offline"))
    (tmp_path / "config.toml").write_text("steps = 3\n")
    yield RunInfo(tmp_path, Config(), 0, 3, True, [])
    gc.collect()  # sockets that Comet leaves open are warned about here, and not in another test


def messages(archive):
    with zipfile.ZipFile(archive) as stored:
        return [json.loads(line)["payload"] for line in stored.read("messages.json").splitlines()]


def test_metrics_settings_and_files_are_stored_and_a_resumed_run_goes_on(run):
    for step in (1, 2):
        (writer,) = open_named_writers(["comet"], run)
        writer.write(step, {"train/loss": 1.0 / step})
        writer.close()
    archives = sorted((run.folder / "offline").glob("*.zip"), key=lambda file: file.stat().st_mtime_ns)
    key = (run.folder / "comet_id").read_text()
    assert [file.name.split("-")[0] for file in archives] == [key, key]
    begun, resumed = map(messages, archives)

    def losses(payloads):
        metrics = [payload["metric"] for payload in payloads if "metric" in payload]
        return [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == "train/loss"]

    assert (losses(begun), losses(resumed)) == ([(1, 1.0)], [(2, 0.5)])
    params = {p["param"]["paramName"]: p["param"]["paramValue"] for p in begun if "param" in p}
    assert params["precision.policy"] == "mixed_float16"
    stored = [p["additional_params"]["fileName"] for p in begun if p.get("upload_type") == "asset"]
    assert "config.toml" in stored


def test_pictures_are_stored_with_their_step(run):
    (writer,) = open_named_writers(["comet"], run)
    writer.images(7, {"masks/3": np.zeros((2, 3, 3), np.uint8)})
    writer.close()
    (archive,) = (run.folder / "offline").glob("*.zip")
    uploads = [payload for payload in messages(archive) if payload.get("upload_type") == "visualization"]
    (about,) = [payload["additional_params"] for payload in uploads]
    assert (about["figName"], about["step"]) == ("masks/3", 7)


def test_a_missing_key_is_an_error_before_the_run(run, monkeypatch):
    monkeypatch.delenv("COMET_START_ONLINE")
    with pytest.raises(UsageError, match="no API key; write `comet login`, or set COMET_START_ONLINE=0"):
        open_named_writers(["comet"], run)


def test_a_server_that_is_down_stops_no_run(run, monkeypatch):
    monkeypatch.setenv("COMET_START_ONLINE", "1")
    monkeypatch.setenv("COMET_API_KEY", "a" * 25)
    monkeypatch.setenv("COMET_URL_OVERRIDE", "http://127.0.0.1:9/clientlib")
    monkeypatch.setenv("COMET_HTTP_SESSION_RETRY_TOTAL", "0")
    monkeypatch.setenv("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "0")
    (writer,) = open_named_writers(["comet"], run)
    writer._thread.join(60)
    with pytest.warns(LoggerWarning, match="comet: .*nothing more is sent, and the run goes on"):
        writer.write(1, {"train/loss": 1.0})
    writer.close()
