"""The console: exact lines in a log, a live display that gives the terminal back, one table in a notebook."""

import io
import math
import os
import re
import subprocess
import sys
import types

import pytest

from mpjax.report import Pace, console_writer


TRAIN = {
    "train/loss": 0.8123,
    "train/accuracy": 0.9531,
    "train/grad_norm": 2.0,
    "train/examples_per_second": 5210.4,
    "train/loss_scale": 32768.0,
    "train/skipped": 1.0,
}
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_log_gets_plain_lines(clock):
    log = io.StringIO()
    writer = console_writer(690, stream=log, clock=clock)
    writer.message("resumed from step 40 [sic]")
    clock.seconds = 10.0  # compiling: no part of the estimate
    writer.write(20, TRAIN)
    clock.seconds = 12.0
    writer.write(120, TRAIN)
    writer.write(120, {"test/loss": 0.6, "test/accuracy": 0.9639})
    clock.seconds = 24.0
    writer.write(690, {"train/loss": math.nan})
    writer.close()
    assert log.getvalue().splitlines() == [
        "resumed from step 40 [sic]",
        "step    20/690  loss 0.8123  accuracy 0.9531  examples/s 5210  loss_scale 32768  skipped 1  eta -:--",
        "step   120/690  loss 0.8123  accuracy 0.9531  examples/s 5210  loss_scale 32768  skipped 1  eta 0:11",
        "test  step 120  loss 0.6000  accuracy 0.9639",
        "step   690/690  loss nan  eta 0:00",
    ]


def test_a_plain_line_is_flushed_at_once():
    flushed = []

    class Log(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    console_writer(10, stream=Log()).write(5, {"test/loss": 1.0})
    assert flushed == ["test  step 5  loss 1.0000\n"]


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console_writer(10, stream=terminal).write(5, {"test/loss": 1.0})
    assert terminal.getvalue() == "test  step 5  loss 1.0000\n"


def test_a_terminal_shows_progress_in_place_within_80_columns(terminal, clock, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    writer = console_writer(690, start_step=40, stream=terminal, clock=clock)
    assert "step 40/690" in terminal.getvalue()
    writer.write(60, TRAIN)
    clock.seconds = 2.0
    writer.write(120, {"test/loss": 0.6, "test/accuracy": 0.9639})
    start = len(terminal.getvalue())
    writer.write(120, TRAIN)
    drawn = _plain(terminal.getvalue()[start:]).splitlines()
    writer.close()
    assert drawn[0].startswith("step 120/690 ")
    assert drawn[0].rstrip().endswith("17% eta 0:19")
    assert [line.rstrip() for line in drawn[1:]] == [
        "train  loss 0.8123  accuracy 0.9531",
        "test   loss 0.6000  accuracy 0.9639",
        "       examples/s 5210  loss_scale 32768  skipped 1",
    ]


def test_messages_and_prints_stand_above_the_display_as_they_are(terminal):
    writer = console_writer(690, stream=terminal)
    writer.message("saved [bold]step[/] :smile: " + "x" * 100)
    print("a stray print")
    writer.close()
    text = _plain(terminal.getvalue())
    assert "saved [bold]step[/] :smile: " + "x" * 100 + "\n" in text
    assert "a stray print\n" in text
    assert text.rindex("step 0/690") > text.rindex("a stray print")


def test_no_color_is_respected(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    writer = console_writer(690, stream=terminal)
    writer.write(120, TRAIN)
    writer.close()
    codes = {code for part in terminal.getvalue().split("\x1b[")[1:] for code in part.split("m")[0].split(";")}
    assert not codes & {str(color) for color in (*range(30, 50), *range(90, 108))}


def test_closing_gives_the_terminal_back(terminal):
    stdout = sys.stdout
    writer = console_writer(690, stream=terminal)
    assert terminal.getvalue().startswith(HIDE_CURSOR)
    writer.close()
    writer.close()
    assert terminal.getvalue().rstrip().endswith(SHOW_CURSOR)
    assert sys.stdout is stdout


@pytest.mark.parametrize(
    "ending", ["raise RuntimeError('lost')", pytest.param("raise KeyboardInterrupt", marks=pytest.mark.slow)]
)
def test_a_program_that_dies_without_closing_leaves_a_cursor(ending):
    pty = pytest.importorskip("pty")
    program = f"from mpjax.report.console import console_writer\nconsole_writer(9).write(3, {{}})\n{ending}"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    os.close(ours)
    process.wait(timeout=20)
    text = seen.decode()
    assert "step 3/9" in text
    assert ending.split()[1].split("(")[0] in text
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux's way to say that the other side has gone
        return b""


def _plain(text):
    """Without control sequences and carriage returns."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_the_first_report_begins_the_estimate_and_the_end_has_none_left():
    seconds = iter([100.0, 102.0])
    pace = Pace(690, lambda: next(seconds))
    assert pace.remaining(20) is None  # what came before was compiling
    assert pace.remaining(120) == 2.0 / 100 * 570
    assert pace.remaining(690) == 0.0


@pytest.fixture
def notebook(monkeypatch):
    """The stream of a notebook, and the outputs that are published."""
    shown = []
    shell = types.SimpleNamespace(display_pub=types.SimpleNamespace(publish=lambda **output: shown.append(output)))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    return stream, shown


def cells(output):
    rows = re.findall(r"<tr>(.*?)</tr>", output["data"]["text/html"])
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in rows]


def test_one_table_has_a_row_for_each_step_and_is_updated_in_place(notebook):
    stream, shown = notebook
    clock = Clock()
    writer = console_writer(40, stream=stream, clock=clock)
    for step, metrics in (
        (10, {"train/loss": 2.0, "train/loss_scale": 1024.0, "train/grad_norm": 3.0}),
        (20, {"train/loss": 1.0, "train/loss_scale": 512.0}),
        (20, {"test/loss": 1.5, "ema/loss": 1.25}),
    ):
        clock.seconds += 1.0
        writer.write(step, metrics)
    assert [output["update"] for output in shown] == [False, True, True]
    assert len({output["transient"]["display_id"] for output in shown}) == 1
    assert cells(shown[-1]) == [
        ["step", "loss", "loss_scale", "test loss", "test ema_loss"],
        ["10", "2.0000", "1024", "", ""],
        ["20", "1.0000", "512", "1.5000", "1.2500"],
    ]
    assert "<b>step 20/40, 50%, eta 0:02</b>" in shown[-1]["data"]["text/html"]
    assert shown[-1]["data"]["text/plain"] == "step 20/40, 50%, eta 0:02\n20  1.0000  512  1.5000  1.2500"
    writer.message("saved")
    assert stream.getvalue() == "saved\n"


def test_many_reports_update_four_times_a_second_and_the_last_is_shown(notebook):
    stream, shown = notebook
    clock = Clock()
    writer = console_writer(100, stream=stream, clock=clock)
    for step in range(1, 101):
        clock.seconds += 0.01
        writer.write(step, {"train/loss": float(step)})
    assert len(shown) == 4
    writer.close()
    writer.close()
    assert len(shown) == 5
    assert [row[0] for row in cells(shown[-1])] == ["step", *map(str, range(89, 101))]
    assert "88 earlier reports are in metrics.jsonl." in shown[-1]["data"]["text/html"]


def test_a_run_without_a_report_shows_nothing(notebook):
    stream, shown = notebook
    console_writer(100, stream=stream).close()
    assert shown == []


def test_what_is_redirected_to_a_file_gets_plain_lines(notebook):
    log = io.StringIO()
    console_writer(10, stream=log).write(5, {"test/loss": 1.0})
    assert log.getvalue() == "test  step 5  loss 1.0000\n"


@pytest.mark.parametrize("ipython", [None, types.SimpleNamespace(get_ipython=lambda: None)])
def test_a_kernel_without_a_shell_gets_plain_lines(notebook, monkeypatch, ipython):
    stream, _ = notebook
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    console_writer(10, stream=stream).write(5, {"test/loss": 1.0})
    assert stream.getvalue() == "test  step 5  loss 1.0000\n"


def test_ipython_is_not_imported():
    code = "import io, sys; from mpjax.report.console import console_writer; console_writer(3, stream=io.StringIO())\n"
    code += "sys.exit('IPython' in sys.modules or 'ipykernel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
