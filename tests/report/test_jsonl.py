"""metrics.jsonl: strict lines, and no trace of an interruption."""

import itertools
import json
import math
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.errors import UsageError
from mpjax.report import JsonlWriter, read_metrics


def ticking(*seconds):
    return itertools.chain(seconds, itertools.repeat(seconds[-1])).__next__


@pytest.fixture
def killed(tmp_path):
    """What a run leaves that was killed while it wrote the line of step 60, after its checkpoint of step 20."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 20, "time": 2.5, "train/loss": 1.5}\n'
        '{"step": 20, "time": 3.0, "test/accuracy": 0.5}\n'
        '{"step": 40, "time": 5.0, "train/loss": 1.25}\n'
        '{"step": 60, "time": 7.0, "tr'
    )
    return path


def test_each_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path, clock=ticking(100.0, 102.5))
    writer.message("not a metric")
    writer.write(20, {"train/loss": 0.5, "train/grad_norm": math.inf, "train/skipped": 1})
    expected = '{"step": 20, "time": 2.5, "train/loss": 0.5, "train/grad_norm": "Infinity", "train/skipped": 1}\n'
    assert path.read_text() == expected
    writer.close()


def test_values_come_back_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, clock=ticking(0.0))
    writer.write(1, {"train/loss": math.nan, "train/grad_norm": -math.inf, "train/accuracy": 0.1})
    writer.close()
    (record,) = read_metrics(path)
    assert math.isnan(record.pop("train/loss"))
    assert record == {"step": 1, "time": 0.0, "train/grad_norm": -math.inf, "train/accuracy": 0.1}


def test_layers_are_one_line_by_direction_and_path(tmp_path, layer):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, clock=ticking(0.0))
    writer.layers(100, [layer, layer._replace(direction="backward", mean=math.inf)])
    writer.close()
    (record,) = read_metrics(path)
    assert record["step"] == 100
    assert record["layers"]["forward"] == {
        "stem/conv": {
            "dtype": "float16",
            "largest": 3.0,
            "mean": 1.5,
            "non_finite": 0.0,
            "overflow": 0.0,
            "underflow": 0.25,
            "subnormal": 0.125,
            "histogram": {"-3": 5, "1": 7},
        }
    }
    assert record["layers"]["backward"]["stem/conv"]["mean"] == math.inf


def test_a_new_run_never_overwrites_an_earlier_one(killed):
    before = killed.read_bytes()
    with pytest.raises(UsageError, match=r"metrics\.jsonl belongs to an earlier run"):
        JsonlWriter(killed)
    assert killed.read_bytes() == before


def test_a_resumed_run_reads_as_undisturbed(killed):
    writer = JsonlWriter(killed, resume_step=20, clock=ticking(100.0, 101.0))
    writer.write(40, {"train/loss": 1.125})
    writer.close()
    assert killed.read_text() == (
        '{"step": 20, "time": 2.5, "train/loss": 1.5}\n'
        '{"step": 20, "time": 3.0, "test/accuracy": 0.5}\n'
        '{"step": 40, "time": 4.0, "train/loss": 1.125}\n'
    )


def test_resuming_after_the_last_line_drops_only_the_torn_one(killed):
    JsonlWriter(killed, resume_step=60).close()
    assert [record["step"] for record in read_metrics(killed)] == [20, 20, 40]
    assert killed.read_text().endswith('"train/loss": 1.25}\n')


def test_a_run_resumed_before_its_first_line_starts_afresh(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl", resume_step=0, clock=ticking(5.0, 6.0))
    writer.write(1, {})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "time": 1.0}]


def test_a_torn_last_line_is_left_out(killed):
    assert [record["step"] for record in read_metrics(killed)] == [20, 20, 40]


def test_a_line_cut_at_its_newline_is_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}')
    assert read_metrics(path) == [{"step": 1, "time": 1.0}]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(path)


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"step": null, "time": 1}',
        '{"step": 1, "time": null}',
        '{"step": true, "time": 1}',
        '{"step": "1", "time": 1}',
        "[" * 9999,
    ],
)
def test_a_line_without_its_numbers_is_named(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{line}\n{{"step": 2, "time": 2.0}}\n')
    with pytest.raises(UsageError, match="metrics.jsonl, line 1 is damaged .*: repair or delete that line"):
        read_metrics(file)
    file.write_text(f'{{"step": 2, "time": 2.0}}\n{line}\n')
    assert [record["step"] for record in read_metrics(file)] == [2]


def test_a_file_that_is_deleted_while_it_is_written_is_an_error_that_names_it(tmp_path):
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write(1, {"a": 1.0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="deleted while being written.*metrics.jsonl"):
        writer.write(2, {"a": 1.0})
    writer.close()


@pytest.mark.parametrize("value", ['"high"', "null", "[1]", "{}", "1" + "0" * 400])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "train/loss": {value}}}\n{{"step": 2}}\n')
    with pytest.raises(UsageError, match="metrics.jsonl, line 1 is damaged .*: repair or delete that line"):
        read_metrics(file)


LINE = b'{"step": 1, "time": 2.5, "train/loss": 1.5}\n'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("NaN"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


def numbers_or_named(file):
    said = None
    try:
        for record in read_metrics(file):
            assert isinstance(sum(float(record.get(name, 0)) for name in ("step", "time", "train/loss")), float)
        JsonlWriter(file, resume_step=2).close()
    except UsageError as error:
        said = str(error)
    assert said is None or f"{file}, line 1 is damaged" in said


@settings(max_examples=150)
@given(st.sampled_from(["step", "time", "train/loss"]), VALUES)
def test_whatever_one_value_of_a_line_is_the_file_is_numbers_or_the_line_is_named(tmp_path_factory, name, value):
    file = tmp_path_factory.mktemp("fuzz") / "metrics.jsonl"
    file.write_bytes(json.dumps(json.loads(LINE) | {name: value}).encode() + b"\n" + LINE)
    numbers_or_named(file)


@settings(max_examples=150)
@given(st.binary(max_size=3), st.integers(0, len(LINE)), st.integers(0, 3))
def test_whatever_bytes_stand_in_a_line_the_file_is_numbers_or_the_line_is_named(
    tmp_path_factory, written, at, dropped
):
    file = tmp_path_factory.mktemp("fuzz") / "metrics.jsonl"
    file.write_bytes((LINE[:at] + written + LINE[at + dropped :]).replace(b"\n", b"") + b"\n" + LINE)
    numbers_or_named(file)
