"""A logger in the background: everything in order, and never in a run's way."""

import threading
import time

import pytest

from mpjax.errors import LoggerWarning, UsageError
from mpjax.report.loggers import InBackground, Logger, require_package


class Recorder(Logger):
    def __init__(self, *, fails_at=None, waits=None):
        self.heard, self.fails_at, self.waits = [], fails_at, waits

    def write(self, step, metrics):
        if self.waits:
            self.waits.wait(10)
        if step == self.fails_at:
            raise ConnectionError("no server\nat all")
        self.heard.append((step, metrics))

    def images(self, step, images):
        self.heard.append((step, images))

    def files(self, paths):
        self.heard.append(sorted(path.name for path in paths))

    def close(self):
        self.heard.append("closed")


def test_everything_arrives_in_order_and_the_files_last(tmp_path):
    for name in ("config.toml", "summary.json", "diagnosis_7.html", "other.txt"):
        (tmp_path / name).touch()
    logger = Recorder()
    writer = InBackground("name", lambda: logger, tmp_path)
    writer.write(1, {"train/loss": 2.0})
    writer.write(2, {"test/loss": 1.0})
    writer.images(2, {"masks/0": "picture"})
    writer.close()
    writer.close()
    files = ["config.toml", "diagnosis_7.html", "summary.json"]
    metrics = [(1, {"train/loss": 2.0}), (2, {"test/loss": 1.0})]
    assert logger.heard == [*metrics, (2, {"masks/0": "picture"}), files, "closed"]


def test_a_failure_is_a_warning_once_and_the_rest_is_left_out(tmp_path):
    logger = Recorder(fails_at=1)
    writer = InBackground("name", lambda: logger, tmp_path)
    writer.write(1, {})
    writer._thread.join(10)
    with pytest.warns(LoggerWarning, match="name: ConnectionError: no server; nothing more is sent"):
        writer.write(2, {})
    writer.write(3, {})  # warnings are errors in these tests: it warns no more
    assert writer._work.empty()  # what nobody will send fills no memory
    writer.close()
    assert logger.heard == ["closed"]


def test_a_logger_that_cannot_be_opened_stops_no_run(tmp_path):
    def broken():
        raise OSError("no network")

    writer = InBackground("name", broken, tmp_path)
    writer._thread.join(10)
    with pytest.warns(LoggerWarning, match="OSError: no network"):
        writer.write(1, {})
    writer.close()


def test_a_slow_logger_holds_nothing_up(tmp_path):
    gate = threading.Event()
    writer = InBackground("name", lambda: Recorder(waits=gate), tmp_path, patience=0.1)
    began = time.monotonic()
    for step in range(100):
        writer.write(step, {})
    with pytest.warns(LoggerWarning, match="not everything is sent after 0.1 s"):
        writer.close()
    assert time.monotonic() - began < 5
    gate.set()


def test_a_missing_package_is_an_error_with_the_command():
    with pytest.raises(UsageError, match=r"--report.writers mlflow: .*pip install 'mpjax\[mlflow\]'"):
        require_package("mlflow", "mpjax.no_such_package")
