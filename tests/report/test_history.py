"""history.jsonl: which steps of a run ran under which settings."""

import pytest

from mpjax.config import load_config, to_toml
from mpjax.errors import UsageError
from mpjax.report import (
    begins,
    changed_settings,
    continued,
    entries_of,
    history_in,
    lines_of,
    other_versions,
    policies_of,
    read_history,
)


ENVIRONMENT = {"python": "3.13.1", "packages": {"jax": "0.12.0"}, "devices": ["cpu"]}


def about(policy="float32", *flags, seconds=10.0):
    config = load_config(["--precision.policy", policy, *flags])
    return {"policy": f"compute={policy}", "config": to_toml(config), "seconds": seconds}


def saved(description, history):
    return description | {"history": history}


def test_a_new_run_has_one_line():
    assert continued({}, 0, about(), ENVIRONMENT) == [
        {"step": 0, "seconds_before": 0.0, "policy": "compute=float32", "changed": {}, **ENVIRONMENT}
    ]


def test_a_resumed_run_adds_what_changed_from_which_step_on():
    first = continued({}, 0, about(), ENVIRONMENT)
    after = about("bfloat16", "--steps", "200", "--loop.keep", "5", "--resume", "--output_dir", "elsewhere")
    history = continued(saved(about(), first), 100, after, ENVIRONMENT)
    assert history[:-1] == first
    assert history[-1] == {
        "step": 100,
        "seconds_before": 10.0,
        "policy": "compute=bfloat16",
        "changed": {
            "loop.keep": ["2", "5"],
            "precision.policy": ["float32", "bfloat16"],
            "steps": ["30 epochs", "200"],
        },
        **ENVIRONMENT,
    }


@pytest.mark.parametrize("position", [100, 250])
def test_steps_that_were_lost_leave_no_line_and_others_one_each(position):
    """A process that was killed before its first checkpoint is followed by one from the same step."""
    first = continued({}, 0, about(), ENVIRONMENT)
    second = continued(saved(about(), first), 100, about("bfloat16"), ENVIRONMENT)
    again = continued(saved(about("bfloat16"), second), position, about("bfloat16"), ENVIRONMENT)
    assert [line["step"] for line in again] == {100: [0, 100], 250: [0, 100, 250]}[position]


def test_a_checkpoint_is_of_a_run_whose_history_begins_with_its_own():
    first = continued({}, 0, about(), ENVIRONMENT)
    second = continued(saved(about(), first), 100, about("bfloat16"), ENVIRONMENT)
    elsewhere = continued({}, 0, about("float16"), ENVIRONMENT)
    assert begins(second, saved(about(), first))
    assert begins(second, saved(about(), second))
    assert not begins(first, saved(about(), second))
    assert not begins(second, saved(about(), elsewhere))
    assert not any(begins(second, about() | stored) for stored in ({}, {"history": []}, {"history": "x"}))


@pytest.mark.parametrize("stored", [{}, {"history": "x"}, {"history": []}, {"history": [{"step": 0}]}])
def test_a_run_of_before_begins_with_what_its_checkpoint_tells(stored):
    history = continued(about() | stored, 40, about("bfloat16"), ENVIRONMENT)
    told = {"step": 0, "seconds_before": 0.0, "policy": "compute=float32", "changed": {}}
    assert history[0] == told | {"told_by": "the checkpoint of step 40"}
    assert history[1]["changed"] == {"precision.policy": ["float32", "bfloat16"]}
    assert history_in(about() | stored, 40) == history[:1]


def test_policies_and_settings_are_told_with_their_steps():
    history = [
        {"step": 0, "policy": "a", "changed": {}},
        {"step": 100, "policy": "b", "changed": {"precision.policy": ["a", "b"], "loop.keep": ["1", "2"]}},
        {"step": 150, "policy": "b", "changed": {}, "metrics_missing": [141, 150]},
        {"step": 1200, "policy": "a", "changed": {"precision.policy": ["b", "a"]}},
    ]
    assert policies_of(history) == "a to step 100, then b to step 1,200, then a"
    assert policies_of(history[:1]) == "a"
    assert policies_of([], "c") == "c"
    assert changed_settings(history) == {
        "precision.policy": "a to step 100, then b to step 1,200, then a",
        "loop.keep": "1 to step 100, then 2",
    }
    assert entries_of(history) == {
        "changed": {"100": "precision.policy b, before a", "1200": "precision.policy a, before b"},
        "metrics_missing": ["141 to 150"],
    }
    assert entries_of(history[:1]) == {}


def test_other_versions_and_devices_are_named():
    newer = {"python": "3.13.1", "packages": {"jax": "0.12.1"}, "devices": ["NVIDIA H200", "NVIDIA H200"]}
    assert list(other_versions([ENVIRONMENT, newer])) == [
        ("devices", "1 cpu", "2 NVIDIA H200"),
        ("jax", "0.12.0", "0.12.1"),
    ]
    assert list(other_versions([{}, newer])) == list(other_versions([newer])) == []


def test_what_is_written_is_read_and_a_torn_last_line_is_left_out(tmp_path):
    history = continued(saved(about(), continued({}, 0, about(), ENVIRONMENT)), 9, about("float16"), ENVIRONMENT)
    file = tmp_path / "history.jsonl"
    assert read_history(file) == []
    file.write_bytes(lines_of(history))
    assert read_history(file) == history
    file.write_bytes(lines_of(history)[:-9])
    assert read_history(file) == history[:1]


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 0}',
        '{"step": 0, "policy": 3, "changed": {}}',
        '{"step": 0, "policy": "a", "changed": []}',
        '{"step": 0, "policy": "a", "changed": {"seed": [0, 1]}}',
        '{"step": 0, "policy": "a", "changed": {"seed": ["0"]}}',
        '{"step": 0, "policy": "a", "changed": {}, "metrics_missing": "all"}',
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "history.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=r"history\.jsonl, line 1 is damaged: remove the file"):
        read_history(tmp_path / "history.jsonl")
