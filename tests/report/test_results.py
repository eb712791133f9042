"""summary.json and the table at the end."""

import json
import math
import os
import socket
import subprocess

import pytest

from mpjax.report import environment, process_of, results, summarise, summary_table, throughput, write_summary


RECORDS = [
    {"step": 20, "time": 1.0, "train/loss": 2.0, "train/skipped": 1.0, "train/loss_scale": 16384.0},
    {"step": 20, "time": 1.5, "test/loss": 1.75, "test/accuracy": 0.875},
    {"step": 40, "time": 2.5, "test/loss": 1.0, "test/accuracy": 0.9375},
    {"step": 60, "time": 3.5, "test/loss": 0.75, "test/accuracy": 0.9375},
    {"step": 80, "time": 4.0, "train/loss": 0.5, "train/skipped": 2.0, "train/loss_scale": 8192.0},
    {"step": 80, "time": 4.5, "test/loss": 0.8, "test/accuracy": 0.9},
]
FACTS = {
    "steps": 78,
    "attempts": 80,
    "skipped": 2,
    "seconds": 75.4,
    "compile_seconds": 8.1,
    "examples_per_second": 5210.4,
    "policy": "mixed_float16",
    "parameters": 175258,
}


def test_final_metrics_are_the_last_and_the_best_is_that_of_the_best_checkpoint():
    assert summarise(RECORDS, **FACTS, best_step=60, seed=3) == {
        "train/loss": 0.5,
        "train/loss_scale": 8192.0,
        "test/loss": 0.8,
        "test/accuracy": 0.9,
        "best/test/accuracy": 0.9375,
        "best/step": 60,
        **FACTS,
        "seed": 3,
    }


def test_a_best_checkpoint_without_a_finite_metric_is_told_of_by_no_number():
    records = [{"step": 1, "test/accuracy": math.nan}, {"step": 2, "test/accuracy": 0.25}]
    assert summarise(records, **FACTS, best_step=2)["best/test/accuracy"] == 0.25
    for step in (1, 3, None):
        assert not {"best/test/accuracy", "best/step"} & summarise(records, **FACTS, best_step=step).keys()


def test_one_slow_interval_does_not_move_the_throughput():
    rates = (5.0, 5000.0, 5200.0, 5100.0)
    records = [{"step": step, "train/examples_per_second": rate} for step, rate in enumerate(rates)]
    assert throughput([*records, {"step": 9, "test/loss": 1.0}]) == 5050.0
    assert math.isnan(throughput([]))


def test_the_file_is_strict_json(tmp_path):
    write_summary(tmp_path / "summary.json", {"test/loss": math.nan, "steps": 78})
    text = (tmp_path / "summary.json").read_text()
    assert text == '{\n  "test/loss": "NaN",\n  "steps": 78\n}\n'
    assert json.loads(text)["steps"] == 78


def test_the_table_is_aligned():
    assert summary_table(summarise(RECORDS, **FACTS, best_step=60)).splitlines() == [
        "policy         mixed_float16",
        "parameters     175,258",
        "steps          78 of 80 applied, 2 skipped",
        "time           1:15, of which 0:08 compiling",
        "throughput     5210 examples/s",
        "loss scale     8192",
        "train loss     0.5000",
        "test loss      0.8000",
        "test accuracy  0.9000  (best 0.9375 at step 60)",
    ]


def test_a_folder_in_the_table_holds_no_commands_for_the_terminal():
    table = summary_table(summarise([], **FACTS, output_dir="runs/a\x1b[2J"))
    assert table.splitlines()[-1] == r"folder      runs/a\x1b[2J"


def test_a_run_without_metrics_has_a_table_too():
    assert summary_table(summarise([], **FACTS)).splitlines()[-1] == "throughput  5210 examples/s"


@pytest.mark.parametrize(("place", "is_own"), [("mpjax", True), (".venv/lib/site-packages/mpjax", False)])
def test_the_commit_is_mpjaxs_and_not_that_of_a_project_around_it(tmp_path, monkeypatch, place, is_own):
    file = tmp_path / place / "report" / "results.py"
    file.parent.mkdir(parents=True)
    file.touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr(results, "__file__", str(file))
    assert environment([], {})["commit"] == (head if is_own else None)


HERE = socket.gethostname()


def described(folder, process, host=HERE):
    file = folder / "environment.json"
    file.write_text(f'{{"process": {process}, "host": {json.dumps(host)}}}')
    return process_of(file)


def test_a_process_is_named_if_it_runs_here_or_ran_elsewhere(tmp_path):
    assert described(tmp_path, os.getpid()) == f"process {os.getpid()} on {HERE}"
    assert described(tmp_path, 7, "elsewhere") == "process 7 on elsewhere"
    assert described(tmp_path, 10**30) == "another process"


@pytest.mark.parametrize(
    "process",
    [
        *("Infinity", "-Infinity", "NaN", '"Infinity"', '"-Infinity"', '"NaN"'),
        *("1e400", "1.5", '"1"', "true", "null", "0", "-1", "[1]", "{}", "9" * 5000),
    ],
)
@pytest.mark.parametrize("host", [HERE, "elsewhere"])
def test_a_process_of_a_damaged_file_is_another(tmp_path, process, host):
    assert described(tmp_path, process, host) == "another process"


@pytest.mark.parametrize("host", [None, 3, ["a"]])
def test_a_host_of_a_damaged_file_is_another(tmp_path, host):
    assert described(tmp_path, 7, host) == "another process"
