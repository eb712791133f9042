"""Several writers as one, and which writers a run has."""

import io
import json
import subprocess
import sys

import pytest

from mpjax.errors import UsageError
from mpjax.extend import Writer
from mpjax.report import Writers, open_writers


def test_a_writer_does_nothing_with_what_it_does_not_override():
    writer = Writer()
    for call in (writer.write, writer.layers, writer.images):
        assert call(1, {}) is None
    for call, arguments in ((writer.saved, [1]), (writer.message, ["hello"]), (writer.close, []), (writer.close, [])):
        assert call(*arguments) is None
    assert not writer.takes_images


class Recorder(Writer):
    def __init__(self, name, calls, failure=None):
        self.name, self.calls, self.failure = name, calls, failure

    def write(self, step, metrics):
        self.calls.append((self.name, step, metrics))

    def layers(self, step, layers):
        self.calls.append((self.name, "layers", step, layers))

    def saved(self, step):
        self.calls.append((self.name, "saved", step))

    def message(self, text):
        self.calls.append((self.name, text))

    def close(self):
        self.calls.append((self.name, "close"))
        if self.failure:
            raise self.failure


def test_every_writer_gets_metrics_and_messages_in_order():
    calls = []
    writers = Writers([Recorder("a", calls), Recorder("b", calls)])
    writers.write(20, {"train/loss": 1.5})
    writers.message("saved")
    assert calls == [("a", 20, {"train/loss": 1.5}), ("b", 20, {"train/loss": 1.5}), ("a", "saved"), ("b", "saved")]


def test_every_writer_gets_the_layers():
    calls = []
    Writers([Recorder("a", calls), Recorder("b", calls)]).layers(100, ["stem"])
    assert calls == [("a", "layers", 100, ["stem"]), ("b", "layers", 100, ["stem"])]


def test_pictures_are_for_writers_that_take_them():
    calls = []

    class Album(Recorder):
        def images(self, step, images):
            self.calls.append((self.name, step, images))

    plain, some = Writers([Recorder("a", calls)]), Writers([Recorder("a", calls), Writers([Album("b", calls)])])
    assert (plain.takes_images, some.takes_images, Writers().takes_images) == (False, True, False)
    plain.images(5, {"masks/0": "picture"})
    some.images(5, {"masks/0": "picture"})
    assert calls == [("b", 5, {"masks/0": "picture"})]


def test_every_writer_is_told_of_a_checkpoint():
    calls = []
    Writers([Recorder("a", calls), Recorder("b", calls)]).saved(100)
    assert calls == [("a", "saved", 100), ("b", "saved", 100)]


def test_a_failing_close_does_not_keep_the_others_open():
    calls = []
    writers = Writers([Recorder("a", calls), Recorder("b", calls, OSError("full")), Recorder("c", calls)])
    with pytest.raises(OSError, match="full"):
        writers.close()
    assert calls == [("c", "close"), ("b", "close"), ("a", "close")]


def test_no_writers_are_silent():
    quiet = Writers()
    quiet.write(1, {"train/loss": 1.0})
    quiet.message("nothing")
    quiet.close()


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
