"""Which writers a run has."""

import io
import json
import subprocess
import sys

import pytest

from mpjax.errors import UsageError
from mpjax.report import open_writers


def test_metrics_reach_console_file_and_tensorboard(tmp_path, capsys):
    writers = open_writers(tmp_path, total_steps=100)
    writers.write(100, {"train/loss": 0.5})
    writers.message("done")
    writers.close()
    assert capsys.readouterr().out == "step   100/100  loss 0.5000  eta 0:00\ndone\n"
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] == 0.5
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_tensorboard_can_be_left_out(tmp_path):
    open_writers(tmp_path, total_steps=100, tensorboard=False).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_goes_on_in_the_same_file(tmp_path):
    for resume_step, step in ((None, 20), (20, 40)):
        writers = open_writers(tmp_path, total_steps=100, resume_step=resume_step)
        writers.write(step, {"train/loss": 0.5})
        writers.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [20, 40]


def test_a_resumed_display_starts_where_the_run_goes_on(tmp_path, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    open_writers(tmp_path, total_steps=100, resume_step=20).close()
    assert "step 20/100" in terminal.getvalue()


def test_an_earlier_run_is_not_overwritten(tmp_path):
    open_writers(tmp_path, total_steps=100).close()
    with pytest.raises(UsageError, match="earlier run"):
        open_writers(tmp_path, total_steps=100)


def test_what_was_opened_is_closed_when_the_rest_fails(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError, match="tensorboard"):  # a file left open would be a warning, and so an error
        open_writers(tmp_path, total_steps=100)


def test_importing_report_is_light():
    program = "import sys, mpjax.report; sys.exit(bool({'jax', 'matplotlib', 'tensorboardX'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
