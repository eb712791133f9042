"""The table of a run in a notebook: one output, updated in place, by what is there already."""

import io
import re
import subprocess
import sys
import types

import pytest

from mpjax.report.console import console_writer


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


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
